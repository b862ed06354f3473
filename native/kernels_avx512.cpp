#include <immintrin.h>

#include "kernels.h"

namespace daypack {
namespace avx512 {
#include "numbers-inl.h"
#include "rules-inl.h"
#include "generic-inl.h"
using generic::round_up;
#include "avx512-inl.h"
#include "avx512_map-inl.h"
#include "runs-inl.h"
#include "avx512_adamw-inl.h"
#include "tiles-inl.h"
#include "product-inl.h"
#include "learn-inl.h"
}  // namespace avx512

const Kernels avx512_kernels{"avx512", avx512::observe, avx512::observe_blocks, avx512::observe_coupled, avx512::apply, avx512::measure,
                              avx512::multiply, avx512::learn::count, avx512::learn::score, avx512::learn::fill_layer};

}  // namespace daypack
