#include <immintrin.h>

#include "kernels.h"

namespace daypack {
namespace avx2 {
#include "numbers-inl.h"
#include "rules-inl.h"
#include "generic-inl.h"
using namespace generic;
#include "runs-inl.h"
#include "tiles-inl.h"
#include "product-inl.h"
#include "learn-inl.h"
}  // namespace avx2

const Kernels avx2_kernels{"avx2", avx2::observe, avx2::observe_blocks, avx2::observe_coupled, avx2::apply, avx2::measure,
                              avx2::multiply, avx2::learn::count, avx2::learn::score, avx2::learn::fill_layer};

}  // namespace daypack
