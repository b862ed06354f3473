// Projected parameters: a low-rank stand-in is stepped by the rule, and its change is applied to the
// parameter; see src/daypack/projection.py.
#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>

#include "passes.h"

namespace daypack {
namespace {

// Parameters up to this size are one task each, with memory of its own.
constexpr int64_t SMALL = 1 << 17;

constexpr int64_t LINE = 16;  // floats in a cache line, at which each lane begins
static_assert(PRODUCT_SCRATCH % LINE == 0, "lanes are whole cache lines");

int64_t shorter(const DaypackParam& d) { return d.full_rows < d.full_cols ? d.full_rows : d.full_cols; }

// The largest stand-in and the largest basis among some parameters.
struct Sizes {
  int64_t low = 0, basis = 0;

  Sizes(const DaypackParam* params, const std::vector<int64_t>& chosen) {
    for (int64_t i : chosen) {
      low = larger(low, elements(params[i]));
      basis = larger(basis, shorter(params[i]) * params[i].rank);
    }
  }

  // Floats of scratch memory that suffice for any of them, in whole cache lines.
  int64_t floats(int64_t lanes) const { return parts(lanes * PRODUCT_SCRATCH + 2 * low + basis, LINE) * LINE; }
};

// Scratch memory of a projected parameter while it is stepped: the stand-in and its gradient, the transposed basis, and for
// each thread the buffers of a block of a product.
class Room {
 public:
  Room(float* first, const Sizes& sizes, int64_t lanes)
      : first_(first), grad_(first + lanes * PRODUCT_SCRATCH), moved_(grad_ + sizes.low), turned_(moved_ + sizes.low) {}

  float* grad() { return grad_; }
  float* moved() { return moved_; }
  float* turned() { return turned_; }
  float* lane(int64_t index) { return first_ + index * PRODUCT_SCRATCH; }

 private:
  float *first_, *grad_, *moved_, *turned_;
};

// All blocks of a product; the sum of squares of the factor that is measured. Any thread may compute any block.
double multiply(const Product& x, Room& room, int threads) {
  const int64_t across = parts(x.b.cols, PRODUCT_COLS), blocks = parts(x.a.rows, PRODUCT_ROWS) * across;
  std::vector<double> squares(static_cast<size_t>(blocks));
  std::atomic<int64_t> next{0};
  parallel_for(blocks < threads ? blocks : threads, threads, [&](int64_t lane) {
    for (int64_t i = next.fetch_add(1); i < blocks; i = next.fetch_add(1)) {
      const int64_t row = i / across * PRODUCT_ROWS, col = i % across * PRODUCT_COLS;
      squares[static_cast<size_t>(i)] =
          kernels().multiply(x, row, row + PRODUCT_ROWS < x.a.rows ? row + PRODUCT_ROWS : x.a.rows, col,
                             col + PRODUCT_COLS < x.b.cols ? col + PRODUCT_COLS : x.b.cols, room.lane(lane));
    }
  });
  return std::accumulate(squares.begin(), squares.end(), 0.0);
}

template <class Raw>
bool all_zero(const void* x, int64_t count) {
  constexpr Raw SIGN = static_cast<Raw>(Raw{1} << (8 * sizeof(Raw) - 1));
  const Raw* bits = static_cast<const Raw*>(x);
  int64_t i = 0;
  while (i < count && (bits[i] & static_cast<Raw>(~SIGN)) == 0) ++i;
  return i == count;
}

bool is_zero(const DaypackParam& d) {
  const int64_t count = d.full_rows * d.full_cols;
  return d.grad_type == DAYPACK_FP32 ? all_zero<uint32_t>(d.grad, count) : all_zero<uint16_t>(d.grad, count);
}

// Both passes over one parameter, which is left as it is if its sum of g^2, the result, is not finite.
float step_one(const DaypackParam& d, const DaypackOptions* options, const Codec* const* codec, Room& room, int threads) {
  const DaypackOptions& o = options[d.options];
  const bool tall = d.full_rows >= d.full_cols;
  const int64_t length = shorter(d);
  for (int64_t i = 0; i < length; ++i)
    for (int64_t j = 0; j < d.rank; ++j) room.turned()[j * length + i] = d.basis[i * d.rank + j];
  const Matrix gradient{d.grad, d.grad_type, d.full_rows, d.full_cols}, moved{room.moved(), DAYPACK_FP32, d.rows, d.cols};
  const Matrix basis{d.basis, DAYPACK_FP32, length, d.rank}, turned{room.turned(), DAYPACK_FP32, d.rank, length};

  Product down{tall ? gradient : turned, tall ? basis : gradient, room.grad(), nullptr, 0, 0, 0, tall ? LEFT : RIGHT};
  const auto total = static_cast<float>(multiply(down, room, threads));
  if (!std::isfinite(total)) return total;
  DaypackParam low = d;
  low.param = room.moved();
  low.grad = room.grad();
  low.param_type = low.grad_type = DAYPACK_FP32;
  low.rank = 0;
  std::memset(room.moved(), 0, static_cast<size_t>(elements(d)) * sizeof(float));
  float of_low = 0;
  observe(&low, 1, options, threads, &of_low);
  if (measures(o)) measure(&low, 1, options, codec, nullptr, threads);
  apply(&low, 1, options, codec, nullptr, threads);

  const auto kept = static_cast<float>(1 - o.lr * o.whole_decay), scale = static_cast<float>(o.scale);
  multiply({tall ? moved : basis, tall ? turned : moved, nullptr, d.param, d.param_type, kept, scale, NEITHER}, room, threads);
  // An all-zero gradient does not use the basis up; squares of tiny ones may underflow.
  if (*d.basis_left > 0 && (total > 0 || !is_zero(d))) --*d.basis_left;
  return total;
}

}  // namespace

DaypackParam unprojected(const DaypackParam& d) {
  DaypackParam whole = d;
  if (d.rank == 0) return whole;
  whole.matrices = 1;
  whole.rows = d.full_rows;
  whole.cols = d.full_cols;
  whole.v_kind = DAYPACK_OWN;
  whole.codes = whole.v_codes = nullptr;
  return whole;
}

bool step_projected(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
                    const uint8_t* active, int threads, float* totals) {
  std::vector<int64_t> small, large;
  for (int64_t i = 0; i < count; ++i)
    if (params[i].rank > 0 && (active == nullptr || active[i] != 0))
      (params[i].full_rows * params[i].full_cols <= SMALL ? small : large).push_back(i);
  const auto step = [&](int64_t i, Room& room, int helpers) {
    const float total = step_one(params[i], options, codecs + i, room, helpers);
    if (totals != nullptr) totals[i] = total;
  };
  // All memory before the first change, and in one piece: a failure within a task could not be reported.
  const Sizes sizes(params, large), each(params, small);
  const auto count_small = static_cast<int64_t>(small.size());
  const int64_t lanes = count_small < threads ? count_small : threads;
  const int64_t needed = larger(large.empty() ? 0 : sizes.floats(threads), lanes * each.floats(1));
  if (needed == 0) return true;
  const std::unique_ptr<float[]> memory(new (std::nothrow) float[static_cast<size_t>(needed + LINE)]);
  if (memory == nullptr) return false;
  const auto at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.get()) / sizeof(float));
  float* first = memory.get() + (LINE - at % LINE) % LINE;

  Room room(first, sizes, threads);
  for (int64_t i : large) step(i, room, threads);
  std::atomic<int64_t> next{0};
  parallel_for(lanes, threads, [&](int64_t lane) {
    Room own(first + lane * each.floats(1), each, 1);
    for (int64_t i = next.fetch_add(1); i < count_small; i = next.fetch_add(1)) step(small[static_cast<size_t>(i)], own, 1);
  });
  return true;
}

}  // namespace daypack
