// The second pass: statistics become second moments, then every element moves.
#include <cstring>

#include "passes.h"

namespace daypack {
namespace {

constexpr int64_t COMBINE_COLS = 1 << 14;

// A moving average, exact at both ends.
float moved(float mean, float now, float lerp) {
  const float change = now - mean;
  return lerp < 0.5f ? mean + lerp * change : now - (1 - lerp) * change;
}

void average(float* mean, const float* sums, int64_t count, float divisor, float lerp) {
  for (int64_t i = 0; i < count; ++i) mean[i] = moved(mean[i], sums[i] / divisor, lerp);
}

// Lines whose mean is that of their group; `across` elements in each.
void average_groups(const DaypackParam& d, float* mean, int64_t matrix, int64_t line, int64_t line_end, int64_t across,
                    float lerp) {
  const float* sums = group_sums(d) + matrix * d.groups;
  for (int64_t i = line; i < line_end; ++i) {
    const int64_t owner = d.owners[i];
    mean[i] = moved(mean[i], sums[owner] / static_cast<float>(d.sizes[owner] * across), lerp);
  }
}

// New means of some rows of one matrix, and of the blocks in them.
void combine_rows(const DaypackParam& d, float lerp, int64_t matrix, int64_t row, int64_t row_end) {
  const int64_t line = matrix * d.rows + row, count = row_end - row;
  if (d.v_kind == DAYPACK_FACTORED) average(d.row + line, d.sums + line, count, static_cast<float>(d.cols), lerp);
  if (d.v_kind == DAYPACK_ROWS) average_groups(d, d.row + matrix * d.rows, matrix, row, row_end, d.cols, lerp);
  if (d.v_kind != DAYPACK_BLOCKS) return;
  const int64_t blocks = parts(d.cols, d.v_block_size), last = d.cols - (blocks - 1) * d.v_block_size;
  for (int64_t at = line * blocks; at < (line + count) * blocks; at += blocks) {
    average(d.block + at, d.sums + at, blocks - 1, static_cast<float>(d.v_block_size), lerp);
    average(d.block + at + blocks - 1, d.sums + at + blocks - 1, 1, static_cast<float>(last), lerp);
  }
}

// New means of some columns of one matrix.
void combine_cols(const DaypackParam& d, float lerp, int64_t matrix, int64_t col, int64_t col_end) {
  const int64_t at = matrix * d.cols + col;
  if (d.v_kind == DAYPACK_COLS)
    average_groups(d, d.col + matrix * d.cols, matrix, col, col_end, d.whole_rows, lerp);
  else
    average(d.col + at, col_sums(d) + at, col_end - col, static_cast<float>(d.whole_rows), lerp);
}

struct Prepared {
  Step step;
  Tiling tiling;
  bool active, together;  // together: a task combines its statistics and uses them at once
  float* mean;            // of the column means, per matrix
};

// One pass over the elements of a list; statistics that are not combined yet are combined first.
class Pass {
 public:
  // `measuring`: over the parameters alone whose rule measures them; a later pass finds their statistics combined.
  Pass(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
       const uint8_t* active, bool measuring)
      : params_(params), options_(options), count_(count), tasks_(count), combines_(count) {
    prepared_.reserve(static_cast<size_t>(count));
    StepMaker steps(options);
    size_t means = 0;
    for (int64_t i = 0; i < count; ++i) {
      const DaypackParam& d = params[i];
      const Tiling tiling = Tiling::of_apply(d);
      const bool measured = measures(options[d.options]);
      const bool on = (active == nullptr || active[i] != 0) && d.rank == 0 && (measured || !measuring);
      const bool alone = d.v_kind == DAYPACK_OWN || tiling.whole_matrices() || (!has_cols(d) && tiling.col_parts == 1);
      const bool together = alone && !measured;
      prepared_.push_back({steps(d, codecs[i]), tiling, on, together, nullptr});
      tasks_.add(on ? tiling.tasks : 0);
      const bool combines = on && !together && d.v_kind != DAYPACK_OWN && measured == measuring;
      combines_.add(combines ? d.matrices * combine_parts(d) : 0);
      means += together ? 0 : static_cast<size_t>(d.matrices);
    }
    means_.resize(means);
    float* mean = means_.data();
    for (int64_t i = 0; i < count; ++i) {
      prepared(i).mean = mean;
      mean += prepared(i).together ? 0 : params[i].matrices;
    }
  }

  // The statistics of the parameters of several tiles.
  void combine(int threads) const {
    combines_.run(1, threads, [&](int64_t owner, int64_t task) {
      const DaypackParam& d = params_[owner];
      const float lerp = prepared(owner).step.fresh2;
      const int64_t each = combine_parts(d), matrix = task / each, part = task % each;
      if (part == 0) combine_rows(d, lerp, matrix, 0, d.rows);
      const int64_t end = (part + 1) * COMBINE_COLS;
      if (has_cols(d)) combine_cols(d, lerp, matrix, part * COMBINE_COLS, end < d.cols ? end : d.cols);
    });
  }

  // Adds up what the rule measures of the parameters, part by part in a fixed order.
  void measure(int threads) {
    find_means();
    std::vector<double> partial(static_cast<size_t>(2 * tasks_.count()));
    std::vector<int64_t> first(static_cast<size_t>(count_) + 1);
    for (int64_t i = 0; i < count_; ++i)
      first[static_cast<size_t>(i) + 1] = first[static_cast<size_t>(i)] + (prepared(i).active ? prepared(i).tiling.tasks : 0);
    tasks_.run(group_of(params_, count_, tasks_.count()), threads, [&](int64_t owner, int64_t task) {
      const Tile tile = prepared(owner).tiling.tile(params_[owner], task);
      kernels().measure(tile, step_of(owner, tile), partial.data() + 2 * (first[static_cast<size_t>(owner)] + task));
    });
    for (int64_t i = 0; i < count_; ++i) {
      if (!prepared(i).active) continue;
      double* squares = params_[i].squares;
      squares[0] = squares[1] = 0;
      for (int64_t task = first[static_cast<size_t>(i)]; task < first[static_cast<size_t>(i) + 1]; ++task)
        for (int k = 0; k < 2; ++k) squares[k] += partial[static_cast<size_t>(2 * task + k)];
    }
  }

  void apply(int threads) {
    find_means();
    for (int64_t i = 0; i < count_; ++i) {
      if (!prepared(i).active) continue;
      *params_[i].step += 1;
      use_norms(prepared(i).step, params_[i], options_[params_[i].options]);
    }
    tasks_.run(group_of(params_, count_, tasks_.count()), threads, [&](int64_t owner, int64_t task) {
      const Tile tile = prepared(owner).tiling.tile(params_[owner], task);
      Step step = step_of(owner, tile);
      if (prepared(owner).together) daypack::combine(tile, step);
      kernels().apply(tile, step);
    });
  }

 private:
  static int64_t combine_parts(const DaypackParam& d) { return has_cols(d) ? larger(parts(d.cols, COMBINE_COLS), 1) : 1; }

  Prepared& prepared(int64_t i) { return prepared_[static_cast<size_t>(i)]; }
  const Prepared& prepared(int64_t i) const { return prepared_[static_cast<size_t>(i)]; }

  Step step_of(int64_t owner, const Tile& tile) const {
    Step step = prepared(owner).step;
    if (!prepared(owner).together) step.mean = prepared(owner).mean[tile.matrix];
    return step;
  }

  void find_means() {
    for (int64_t i = 0; i < count_; ++i) {
      const DaypackParam& d = params_[i];
      if (!prepared(i).active || prepared(i).together || d.v_kind != DAYPACK_FACTORED) continue;
      for (int64_t matrix = 0; matrix < d.matrices; ++matrix) {
        Step step{};
        use_mean({&d, matrix, 0, d.rows, 0, d.cols}, step);
        prepared(i).mean[matrix] = step.mean;
      }
    }
  }

  const DaypackParam* params_;
  const DaypackOptions* options_;
  int64_t count_;
  TaskList tasks_, combines_;
  std::vector<Prepared> prepared_;
  std::vector<float> means_;
};

}  // namespace

// Most codebooks are equal: new tables are made only where one differs from the first and from the one before it.
int64_t Codecs::prepare(const DaypackParam* params, int64_t count, const uint8_t* active, int threads) {
  constexpr int64_t GROUP = 128;
  each_.assign(static_cast<size_t>(count), nullptr);
  const auto needs = [&](int64_t i) { return params[i].codebook != nullptr && (active == nullptr || active[i] != 0); };
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

void combine(const Tile& tile, Step& step) {
  const DaypackParam& d = *tile.param;
  combine_rows(d, step.fresh2, tile.matrix, tile.row, tile.row_end);
  if (has_cols(d)) combine_cols(d, step.fresh2, tile.matrix, 0, d.cols);
  use_mean(tile, step);
}

void use_mean(const Tile& tile, Step& step) {
  const DaypackParam& d = *tile.param;
  if (d.v_kind != DAYPACK_FACTORED) return;
  constexpr int LANES = 8;
  double sums[LANES] = {}, sum = 0;
  const float* col = d.col + tile.matrix * d.cols;
  for (int64_t i = 0; i < d.cols; ++i) sums[i % LANES] += col[i];
  for (double lane : sums) sum += lane;
  step.mean = static_cast<float>(sum / static_cast<double>(d.cols));
}

void measure(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
             const uint8_t* active, int threads) {
  Pass pass(params, count, options, codecs, active, true);
  pass.combine(threads);
  pass.measure(threads);
}

void apply(const DaypackParam* params, int64_t count, const DaypackOptions* options, const Codec* const* codecs,
           const uint8_t* active, int threads) {
  Pass pass(params, count, options, codecs, active, false);
  pass.combine(threads);
  pass.apply(threads);
}

}  // namespace daypack
