#include "kernels.h"

namespace daypack {
namespace portable {
#include "numbers.h"
#include "rules.h"
#include "generic.h"
using namespace generic;
#include "runs.h"
#include "tiles.h"
#include "product.h"
#include "learn.h"
}  // namespace portable

const Kernels portable_kernels{"portable", portable::observe, portable::observe_blocks, portable::observe_coupled, portable::apply, portable::measure,
                              portable::multiply, portable::learn::count, portable::learn::score, portable::learn::fill_layer};

}  // namespace daypack
