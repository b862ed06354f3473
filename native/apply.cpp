// The second pass: statistics become second moments, then every element moves.
#include <cmath>
#include <cstring>

#include "passes.h"

namespace daypack {
namespace {

constexpr int64_t COMBINE_COLS = 1 << 14;

void average(float* mean, const float* sums, int64_t count, float divisor, float lerp) {
  for (int64_t i = 0; i < count; ++i) {
    const float now = sums[i] / divisor, change = now - mean[i];
    mean[i] = lerp < 0.5f ? mean[i] + lerp * change : now - (1 - lerp) * change;  // exact at both ends
  }
}

// New row means and block means of some rows of one matrix.
void combine_rows(const DaypackParam& d, float lerp, int64_t matrix, int64_t row, int64_t row_end) {
  const int64_t line = matrix * d.rows + row, count = row_end - row;
  if (d.v_kind == DAYPACK_FACTORED) average(d.row + line, d.sums + line, count, static_cast<float>(d.cols), lerp);
  if (d.v_kind != DAYPACK_BLOCKS) return;
  const int64_t blocks = parts(d.cols, d.v_block_size), last = d.cols - (blocks - 1) * d.v_block_size;
  for (int64_t at = line * blocks; at < (line + count) * blocks; at += blocks) {
    average(d.block + at, d.sums + at, blocks - 1, static_cast<float>(d.v_block_size), lerp);
    average(d.block + at + blocks - 1, d.sums + at + blocks - 1, 1, static_cast<float>(last), lerp);
  }
}

// New column means of some columns of one matrix; returns their sum.
double combine_cols(const DaypackParam& d, float lerp, int64_t matrix, int64_t col, int64_t col_end) {
  const int64_t at = matrix * d.cols + col;
  average(d.col + at, d.sums + d.matrices * d.rows + at, col_end - col, static_cast<float>(d.rows), lerp);
  double sum = 0;
  for (int64_t i = 0; i < col_end - col; ++i) sum += d.col[at + i];
  return sum;
}

struct Prepared {
  Step step;
  Tiling tiling;
  bool active, together;  // together: one task combines a matrix's statistics and uses them at once
  float* mean;            // per matrix
  double* mean_parts;     // per matrix and COMBINE_COLS columns
};

class Application {
 public:
  Application(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
              const uint8_t* active)
      : params_(params), count_(count), tasks_(count), combines_(count) {
    prepared_.reserve(static_cast<size_t>(count));
    StepMaker steps(options);
    size_t means = 0, mean_parts = 0;
    for (int64_t i = 0; i < count; ++i) {
      const DaypackParam& d = params[i];
      const Tiling tiling = Tiling::of_apply(d);
      const bool on = active == nullptr || active[i] != 0;
      const bool together = d.v_kind == DAYPACK_DENSE || tiling.whole_matrices() ||
                            (d.v_kind == DAYPACK_BLOCKS && tiling.col_parts == 1);
      prepared_.push_back({steps(d, codecs[i]), tiling, on, together, nullptr, nullptr});
      tasks_.add(on ? tiling.tasks : 0);
      combines_.add(on && !together ? d.matrices * combine_parts(d) : 0);
      if (together) continue;
      means += static_cast<size_t>(d.matrices);
      mean_parts += static_cast<size_t>(d.matrices * combine_parts(d));
    }
    means_.resize(means);
    mean_parts_.resize(mean_parts);
    float* mean = means_.data();
    double* mean_part = mean_parts_.data();
    for (int64_t i = 0; i < count; ++i) {
      Prepared& p = prepared_[static_cast<size_t>(i)];
      if (p.together) continue;
      p.mean = mean;
      p.mean_parts = mean_part;
      mean += params[i].matrices;
      mean_part += params[i].matrices * combine_parts(params[i]);
    }
  }

  // The statistics of the parameters of several tiles.
  void combine(int threads) const {
    combines_.run(1, threads, [&](int64_t owner, int64_t task) {
      const DaypackParam& d = params_[owner];
      const Prepared& p = prepared_[static_cast<size_t>(owner)];
      const int64_t each = combine_parts(d), matrix = task / each, part = task % each;
      if (part == 0) combine_rows(d, p.step.weight2, matrix, 0, d.rows);
      const int64_t end = (part + 1) * COMBINE_COLS;
      if (d.v_kind == DAYPACK_FACTORED)
        p.mean_parts[task] = combine_cols(d, p.step.weight2, matrix, part * COMBINE_COLS, end < d.cols ? end : d.cols);
    });
    for (int64_t i = 0; i < count_; ++i) {
      const DaypackParam& d = params_[i];
      const Prepared& p = prepared_[static_cast<size_t>(i)];
      if (!p.active || p.together || d.v_kind != DAYPACK_FACTORED) continue;
      for (int64_t matrix = 0; matrix < d.matrices; ++matrix) {
        double sum = 0;
        for (int64_t k = 0; k < combine_parts(d); ++k) sum += p.mean_parts[matrix * combine_parts(d) + k];
        p.mean[matrix] = static_cast<float>(sum / static_cast<double>(d.cols));
      }
    }
  }

  void run(int threads) const {
    for (int64_t i = 0; i < count_; ++i)
      if (prepared_[static_cast<size_t>(i)].active) *params_[i].step += 1;
    tasks_.run(group_of(params_, count_, tasks_.count()), threads, [&](int64_t owner, int64_t task) {
      const Prepared& p = prepared_[static_cast<size_t>(owner)];
      const Tile tile = p.tiling.tile(params_[owner], task);
      if (p.together) return combine_and_apply(tile, p.step);
      Step step = p.step;
      step.mean = p.mean[tile.matrix];
      kernels().apply(tile, step);
    });
  }

 private:
  static int64_t combine_parts(const DaypackParam& d) {
    return d.v_kind == DAYPACK_FACTORED ? parts(d.cols, COMBINE_COLS) : 1;
  }

  const DaypackParam* params_;
  int64_t count_;
  TaskList tasks_, combines_;
  std::vector<Prepared> prepared_;
  std::vector<float> means_;
  std::vector<double> mean_parts_;
};

}  // namespace

Step make_step(const DaypackOptions& o, double taken, const Codec* codec) {
  Step s{};
  s.beta1 = static_cast<float>(o.beta1);
  s.weight = static_cast<float>(o.sign * (1 - o.beta1));
  s.beta2 = static_cast<float>(o.beta2);
  s.weight2 = static_cast<float>(1 - o.beta2);
  s.decay = static_cast<float>(1 - o.lr * o.weight_decay);
  s.rate = static_cast<float>(o.lr / (1 - std::pow(o.beta1, taken)));
  s.eps = static_cast<float>(o.eps);
  s.correction2 = static_cast<float>(1 - std::pow(o.beta2, taken));
  s.turn = static_cast<uint32_t>(static_cast<uint64_t>(taken) * DITHER_STEP);
  s.codec = codec;
  return s;
}

// Codebooks are equal as a rule: a new set of tables only where one differs from the first and from the one before it.
int64_t Codecs::prepare(const DaypackParam* params, int64_t count, const uint8_t* active, int threads) {
  constexpr int64_t GROUP = 128;
  each_.assign(static_cast<size_t>(count), nullptr);
  const auto needs = [&](int64_t i) { return params[i].codes != nullptr && (active == nullptr || active[i] != 0); };
  const auto equal = [&](int64_t i, const Codec& codec) {
    return std::memcmp(codec.level, params[i].codebook, sizeof codec.level) == 0;
  };
  int64_t first = 0;
  while (first < count && !needs(first)) ++first;
  if (first == count) return -1;
  all_.push_back(std::make_unique<Codec>());
  const Codec* common = all_[0].get();
  if (!daypack::prepare(*all_[0], params[first].codebook)) return first;
  parallel_for(parts(count - first, GROUP), threads, [&](int64_t part) {
    for (int64_t i = first + part * GROUP; i < count && i < first + (part + 1) * GROUP; ++i)
      if (needs(i) && equal(i, *common)) each_[static_cast<size_t>(i)] = common;
  });
  for (int64_t i = first; i < count; ++i) {
    const Codec*& chosen = each_[static_cast<size_t>(i)];
    if (!needs(i) || chosen != nullptr) continue;
    if (!equal(i, *all_.back())) {
      all_.push_back(std::make_unique<Codec>());
      if (!daypack::prepare(*all_.back(), params[i].codebook)) return i;
    }
    chosen = all_.back().get();
  }
  return -1;
}

void combine_and_apply(const Tile& tile, Step step) {
  const DaypackParam& d = *tile.param;
  combine_rows(d, step.weight2, tile.matrix, tile.row, tile.row_end);
  if (d.v_kind == DAYPACK_FACTORED)
    step.mean = static_cast<float>(combine_cols(d, step.weight2, tile.matrix, 0, d.cols) / static_cast<double>(d.cols));
  kernels().apply(tile, step);
}

void apply(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
           const uint8_t* active, int threads) {
  const Application application(params, count, options, codecs, active);
  application.combine(threads);
  application.run(threads);
}

}  // namespace daypack
