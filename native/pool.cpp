#include "pool.h"

#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <unistd.h>
#endif

namespace daypack {
namespace {

// A call's tasks. It lives on the caller's stack: workers may touch it only between `join` and `leave`.
struct Job {
  Task task;
  void* context;
  int64_t count;
  std::fenv_t environment;  // rounding and denormal handling of the caller, so that all tasks compute alike
  std::atomic<int64_t> next{0};

  void run() {
    for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(context, i);
  }
};

class Pool {
 public:
  bool try_run(Job& job, int helpers) {
    std::unique_lock<std::mutex> busy(calls_, std::try_to_lock);
    if (!busy) return false;
    while (static_cast<int>(workers_) < helpers && start()) {
    }
    {
      std::lock_guard<std::mutex> guard(lock_);
      job_ = &job;
      wanted_ = helpers;
    }
    if (helpers == 1) wake_.notify_one();
    else wake_.notify_all();
    job.run();
    // A worker that has not woken up by now is not waited for: it will find no job.
    std::unique_lock<std::mutex> guard(lock_);
    job_ = nullptr;
    done_.wait(guard, [this] { return running_ == 0; });
    return true;
  }

 private:
  bool start() {
    try {
      std::thread(&Pool::work, this).detach();
    } catch (...) {
      return false;  // no more threads to be had: go on with those that exist
    }
    ++workers_;
    return true;
  }

  void work() {
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      wake_.wait(guard, [this] { return job_ != nullptr && wanted_ > 0; });
      Job* job = job_;
      --wanted_;
      ++running_;
      guard.unlock();
      std::fesetenv(&job->environment);
      job->run();
      guard.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex calls_, lock_;
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  int wanted_ = 0, running_ = 0, workers_ = 0;
};

// Never destroyed: its threads sleep until the process ends. A forked child has none of them and starts a pool anew.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
#if defined(_WIN32)
  static Pool* only = new Pool;
  return *only;
#else
  static std::atomic<pid_t> owner{0};
  static std::atomic_flag changing = ATOMIC_FLAG_INIT;
  if (owner.load() != getpid()) {
    while (changing.test_and_set()) {
    }
    if (owner.load() != getpid()) {
      current.store(new Pool);
      owner.store(getpid());
    }
    changing.clear();
  }
  return *current.load();
#endif
}

}  // namespace

void parallel(int64_t count, int threads, Task task, void* context) {
  Job job{task, context, count, {}};
  std::fegetenv(&job.environment);
  const int64_t helpers = (count < threads ? count : threads) - 1;
  if (helpers < 1 || !pool().try_run(job, static_cast<int>(helpers))) job.run();
}

}  // namespace daypack
