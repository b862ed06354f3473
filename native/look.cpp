// Whether tensors are still where they were, asked through a C function that torch keeps stable for code compiled apart
// from it (torch/csrc/inductor/aoti_torch/c/shim.h). The same check in Python takes as long as a step of small
// parameters.
#include <atomic>

#include "daypack.h"
#include "pool.h"

int daypack_look(DaypackDataPtr data_ptr, void* const* tensors, int64_t count, int threads, void** places) {
  constexpr int64_t GROUP = 1024;
  std::atomic<bool> failed{false};
  daypack::parallel_for((count + GROUP - 1) / GROUP, threads, [&](int64_t part) {
    for (int64_t i = part * GROUP; i < count && i < (part + 1) * GROUP; ++i)
      if (data_ptr(tensors[i], &places[i]) != 0) failed = true;
  });
  return failed ? -1 : 0;
}
