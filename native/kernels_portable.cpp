#include "kernels.h"

namespace daypack {
namespace portable {
#include "numbers-inl.h"
#include "rules-inl.h"
#include "generic-inl.h"
using namespace generic;
#include "runs-inl.h"
#include "tiles-inl.h"
#include "product-inl.h"
#include "learn-inl.h"
}  // namespace portable

const Kernels portable_kernels{"portable", portable::observe, portable::observe_blocks, portable::observe_coupled, portable::apply, portable::measure,
                              portable::multiply, portable::learn::count, portable::learn::score, portable::learn::fill_layer};

}  // namespace daypack
