#include "kernels.h"

namespace daypack {
namespace portable {
#include "numbers.h"
#include "generic.h"
using namespace generic;
#include "tiles.h"
}  // namespace portable

const Kernels portable_kernels{"portable", portable::observe, portable::observe_blocks, portable::apply};

}  // namespace daypack
