#include <immintrin.h>

#include "kernels.h"

namespace daypack {
namespace avx512 {
#include "numbers.h"
#include "generic.h"
using generic::step_block;
using generic::step_dense;
#include "avx512.h"
#include "tiles.h"
#include "learn.h"
}  // namespace avx512

const Kernels avx512_kernels{"avx512", avx512::observe, avx512::observe_blocks, avx512::apply,
                              avx512::learn::count, avx512::learn::score, avx512::learn::fill_layer};

}  // namespace daypack
