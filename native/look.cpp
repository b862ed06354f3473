// Whether tensors are still where they were, asked through the C functions that torch keeps stable for code compiled apart
// from it (torch/csrc/inductor/aoti_torch/c/shim.h). From Python the same question costs as much as a step of small
// parameters.
#include "daypack.h"

namespace {

uint64_t mixed(uint64_t hash, int64_t value) {
  hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 32);
}

}  // namespace

int daypack_look(const DaypackTorch* torch, void* const* tensors, int64_t count, uint64_t* places, uint64_t* layouts) {
  for (int64_t i = 0; i < count; ++i) {
    void* place = nullptr;
    int32_t type = 0;
    int64_t dim = 0, *sizes = nullptr, *strides = nullptr;
    if (torch->data_ptr(tensors[i], &place) != 0 || torch->dtype(tensors[i], &type) != 0 ||
        torch->dim(tensors[i], &dim) != 0 || torch->sizes(tensors[i], &sizes) != 0 ||
        torch->strides(tensors[i], &strides) != 0)
      return -1;
    uint64_t hash = mixed(static_cast<uint64_t>(type), dim);
    for (int64_t d = 0; d < dim; ++d) hash = mixed(mixed(hash, sizes[d]), strides[d]);
    places[i] = reinterpret_cast<uintptr_t>(place);
    layouts[i] = hash;
  }
  return 0;
}
