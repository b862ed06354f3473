#include "pool.h"

#include "daypack.h"

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
    std::fesetenv(&environment);
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
    // Do not wait for a worker that has not woken up by now: it will find no job.
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

// GOMP_parallel of the runtime that torch uses. Its threads are awake when a step begins, right after the backward pass, and
// spin for a while: workers of our own would have to share the processors with them.
using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<Team> team{nullptr};

#if defined(_WIN32)
bool forked() { return false; }
#else
const pid_t parent = getpid();
bool forked() { return getpid() != parent; }  // a child has none of the runtime's threads, and would wait for them
#endif

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
  const Team borrowed = team.load(std::memory_order_relaxed);
  if (helpers > 0 && borrowed != nullptr && !forked()) {
    borrowed([](void* job_of) { static_cast<Job*>(job_of)->run(); }, &job, static_cast<unsigned>(helpers + 1), 0);
    return;
  }
  if (helpers < 1 || !pool().try_run(job, static_cast<int>(helpers))) job.run();
}

void borrow(void* parallel_of_runtime) { team.store(reinterpret_cast<Team>(parallel_of_runtime)); }

}  // namespace daypack

void daypack_borrow_threads(void* gomp_parallel) { daypack::borrow(gomp_parallel); }
