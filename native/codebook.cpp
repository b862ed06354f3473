// The exact codebook: calibration/codebook.py's dynamic programme, operation by operation, so that both give the same bits.
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace daypack {
namespace {

using Doubles = std::vector<double>;
using Indices = std::vector<int64_t>;

// One half of the histogram, seen from 0 outwards: bins of width 1 / bins, centres in (0, 1).
class Half {
 public:
  Half(const double* weights, int64_t bins, int64_t stride, int64_t free)
      : bins_(bins), w_(size()), x_(size()), xx_(size()), errors(static_cast<size_t>(free) + 1) {
    for (int64_t i = 0; i < bins; ++i) {
      const double centre = (static_cast<double>(i) + 0.5) / static_cast<double>(bins), w = weights[i * stride];
      const size_t at = static_cast<size_t>(i);
      w_[at + 1] = w_[at] + w;
      x_[at + 1] = x_[at] + w * centre;
      xx_[at + 1] = xx_[at] + w * (centre * centre);
    }
  }

  // Least errors with 0..free levels between 0 and 1, and where each segment begins.
  void solve() {
    Doubles best = xx_, next(size()), scratch(size()), outer(size());
    const double w = w_[size() - 1], x = x_[size() - 1], xx = xx_[size() - 1];
    for (size_t j = 0; j < size(); ++j) outer[j] = (xx - xx_[j]) - 2 * (x - x_[j]) + (w - w_[j]);
    for (size_t k = 0; k < errors.size(); ++k) {
      size_t least = 0;
      for (size_t j = 1; j < size(); ++j)
        if (best[j] + outer[j] < best[least] + outer[least]) least = j;
      last_.push_back(static_cast<int64_t>(least));
      errors[k] = best[least] + outer[least];
      if (k + 1 == errors.size()) break;
      starts_.emplace_back(size());
      kernels().fill_layer({bins_, w_.data(), x_.data(), xx_.data(), best.data(), next.data(), scratch.data(),
                            starts_.back().data()});
      best.swap(next);
    }
  }

  // The levels of `count` free segments, from 1 inwards; empty segments have none.
  int64_t levels(int64_t count, double sign, double* values) const {
    int64_t found = 0, stop = last_[static_cast<size_t>(count)];
    for (int64_t k = count - 1; k >= 0; --k) {
      const int64_t start = starts_[static_cast<size_t>(k)][static_cast<size_t>(stop)];
      const size_t a = static_cast<size_t>(start), b = static_cast<size_t>(stop);
      if (w_[b] - w_[a] > 0) values[found++] = sign * ((x_[b] - x_[a]) / (w_[b] - w_[a]));
      stop = start;
    }
    return found;
  }

 private:
  size_t size() const { return static_cast<size_t>(bins_) + 1; }

  int64_t bins_;
  Doubles w_, x_, xx_;  // sums over the first i bins of weight times centre^0, 1, 2
  Indices last_;
  std::vector<Indices> starts_;

 public:
  Doubles errors;
};

}  // namespace
}  // namespace daypack

int64_t daypack_codebook(const double* weights, int64_t bins, int64_t levels, int threads, double* values) {
  const int64_t free = levels - 3, half = bins / 2;
  daypack::Half halves[2] = {{weights + half - 1, half, -1, free}, {weights + half, half, 1, free}};
  daypack::parallel_for(2, threads, [&](int64_t side) { halves[side].solve(); });
  int64_t left = 0;
  const auto error = [&](int64_t k) {
    return halves[0].errors[static_cast<size_t>(k)] + halves[1].errors[static_cast<size_t>(free - k)];
  };
  for (int64_t k = 1; k <= free; ++k)
    if (error(k) < error(left)) left = k;
  const int64_t found = halves[0].levels(left, -1.0, values);
  return found + halves[1].levels(free - left, 1.0, values + found);
}
