#include "kernels.h"

namespace daypack {
namespace portable {
#include "numbers.h"
#include "generic.h"
using namespace generic;
#include "tiles.h"
#include "learn.h"
}  // namespace portable

const Kernels portable_kernels{"portable", portable::observe, portable::observe_blocks, portable::apply,
                              portable::learn::count, portable::learn::score, portable::learn::fill_layer};

}  // namespace daypack
