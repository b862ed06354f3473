#include <immintrin.h>

#include "kernels.h"

namespace daypack {
namespace avx512 {
#include "numbers.h"
#include "rules.h"
#include "generic.h"
using generic::round_up;
#include "avx512.h"
#include "avx512_map.h"
#include "runs.h"
#include "avx512_adamw.h"
#include "tiles.h"
#include "product.h"
#include "learn.h"
}  // namespace avx512

const Kernels avx512_kernels{"avx512", avx512::observe, avx512::observe_blocks, avx512::observe_coupled, avx512::apply, avx512::measure,
                              avx512::multiply, avx512::learn::count, avx512::learn::score, avx512::learn::fill_layer};

}  // namespace daypack
