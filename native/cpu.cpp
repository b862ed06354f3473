// Which kernels this machine can run.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace daypack {
namespace {

bool supported(const Kernels& candidate) {
#if defined(DAYPACK_X86)
  __builtin_cpu_init();
  if (&candidate == &avx2_kernels)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (&candidate == &avx512_kernels)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return &candidate == &portable_kernels;
}

// Best first.
const Kernels* const all[] = {
#if defined(DAYPACK_X86)
    &avx512_kernels, &avx2_kernels,
#endif
    &portable_kernels};

const Kernels* find(const char* name) {
  for (const Kernels* candidate : all)
    if ((name == nullptr || std::strcmp(candidate->name, name) == 0) && supported(*candidate)) return candidate;
  return nullptr;
}

std::atomic<const Kernels*> current{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* chosen = current.load(std::memory_order_relaxed);
  if (chosen == nullptr) {
    chosen = find(std::getenv("DAYPACK_CPU"));
    if (chosen == nullptr) chosen = find(nullptr);  // unknown here: the caller reads back what it got
    current.store(chosen, std::memory_order_relaxed);
  }
  return *chosen;
}

bool select(const char* name) {
  const Kernels* chosen = find(name);
  if (chosen != nullptr) current.store(chosen, std::memory_order_relaxed);
  return chosen != nullptr;
}

}  // namespace daypack
