#include <immintrin.h>

#include "kernels.h"

namespace daypack {
namespace avx2 {
#include "numbers.h"
#include "generic.h"
using namespace generic;
#include "tiles.h"
}  // namespace avx2

const Kernels avx2_kernels{"avx2", avx2::observe, avx2::observe_blocks, avx2::apply};

}  // namespace daypack
