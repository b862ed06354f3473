// Threads: those of the OpenMP runtime that torch has loaded, else workers of our own that sleep between calls. Work is
// handed out in numbered tasks; results must not depend on who runs one.
#pragma once
#include <cstdint>

namespace daypack {

using Task = void (*)(void* context, int64_t index);

// Run task(context, 0..count-1) on at most `threads` threads, the caller among them; returns when all are done. A second
// caller at the same time runs its tasks alone instead of waiting.
void parallel(int64_t count, int threads, Task task, void* context);

template <class Function>
void parallel_for(int64_t count, int threads, Function&& function) {
  parallel(
      count, threads, [](void* context, int64_t index) { (*static_cast<Function*>(context))(index); }, &function);
}

}  // namespace daypack
