// The first pass: tiles run in parallel, their partial sums are added in a fixed order.
#include <cstring>

#include "passes.h"

namespace daypack {
namespace {

// Where the partial sums of one factored parameter go: the scratch buffer, or, where there is one part, the result itself.
struct Partial {
  float *rows = nullptr, *cols = nullptr;
  double* totals = nullptr;
};

class Observation {
 public:
  Observation(const DaypackParam* params, int64_t count, const DaypackOptions* options)
      : params_(params), options_(options), tasks_(count) {
    partials_.resize(static_cast<size_t>(count));
    tilings_.reserve(static_cast<size_t>(count));
    int64_t floats = 0;
    for (int64_t i = 0; i < count; ++i) {
      tilings_.push_back(Tiling::of_observe(params[i]));
      tasks_.add(tilings_.back().tasks);
      floats += row_floats(i) + col_floats(i);
    }
    scratch_.resize(static_cast<size_t>(floats));
    totals_.resize(static_cast<size_t>(tasks_.count()));
    float* free = scratch_.data();
    double* total = totals_.data();
    for (int64_t i = 0; i < count; ++i) {
      const DaypackParam& d = params[i];
      Partial& partial = partials_[static_cast<size_t>(i)];
      partial.totals = total;
      total += tiling(i).tasks;
      if (!has_rows(d)) continue;
      partial.rows = row_floats(i) > 0 ? free : d.sums;
      free += row_floats(i);
      if (!has_cols(d)) continue;
      partial.cols = col_floats(i) > 0 ? free : col_sums(d);
      free += col_floats(i);
    }
  }

  void run(int64_t count, int threads) const {
    tasks_.run(group_of(params_, count, tasks_.count()), threads, [&](int64_t i, int64_t task) {
      const DaypackParam& d = params_[i];
      const Tile tile = tiling(i).tile(d, task);
      const Partial& partial = partials_[static_cast<size_t>(i)];
      const int64_t row_part = tile.row / tiling(i).row_step, col_part = tile.col / tiling(i).col_step;
      float *rows = nullptr, *cols = nullptr;
      if (has_rows(d)) rows = partial.rows + (col_part * d.matrices + tile.matrix) * d.rows + tile.row;
      if (has_cols(d))
        cols = partial.cols + (row_part * d.matrices + tile.matrix) * d.cols + tile.col;
      partial.totals[task] = observe_tile(tile, options_[d.options], rows, cols);
    });
  }

  // The complete sums of one parameter; returns the sum of all.
  float reduce(int64_t i) const {
    const DaypackParam& d = params_[i];
    const Partial& partial = partials_[static_cast<size_t>(i)];
    if (row_floats(i) > 0) add_row_parts(d.sums, partial.rows, d.matrices * d.rows, tiling(i).col_parts);
    if (col_floats(i) > 0)
      add_col_parts(col_sums(d), partial.cols, d.matrices * d.cols, tiling(i).row_parts);
    sum_groups(d);
    double total = 0;
    for (int64_t task = 0; task < tiling(i).tasks; ++task) total += partial.totals[task];
    return static_cast<float>(total);
  }

 private:
  const Tiling& tiling(int64_t i) const { return tilings_[static_cast<size_t>(i)]; }

  int64_t row_floats(int64_t i) const {
    const DaypackParam& d = params_[i];
    return has_rows(d) && tiling(i).col_parts > 1 ? tiling(i).col_parts * d.matrices * d.rows : 0;
  }

  int64_t col_floats(int64_t i) const {
    const DaypackParam& d = params_[i];
    return has_cols(d) && tiling(i).row_parts > 1 ? tiling(i).row_parts * d.matrices * d.cols : 0;
  }

  static void add_col_parts(float* sums, const float* part, int64_t size, int64_t count) {
    for (int64_t i = 0; i < size; ++i) {
      float sum = part[i];
      for (int64_t k = 1; k < count; ++k) sum += part[k * size + i];
      sums[i] = sum;
    }
  }

  // Long rows have many parts: added in double.
  static void add_row_parts(float* sums, const float* part, int64_t size, int64_t count) {
    for (int64_t i = 0; i < size; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < count; ++k) sum += part[k * size + i];
      sums[i] = static_cast<float>(sum);
    }
  }

  const DaypackParam* params_;
  const DaypackOptions* options_;
  TaskList tasks_;
  std::vector<Tiling> tilings_;
  std::vector<Partial> partials_;
  std::vector<float> scratch_;
  std::vector<double> totals_;
};

}  // namespace

// Lines of a group follow each other.
void sum_groups(const DaypackParam& d) {
  const bool by_rows = d.v_kind == DAYPACK_ROWS;
  if (!by_rows && d.v_kind != DAYPACK_COLS) return;
  const int64_t lines = by_rows ? d.rows : d.cols;
  for (int64_t matrix = 0; matrix < d.matrices; ++matrix) {
    const float* line = (by_rows ? d.sums : col_sums(d)) + matrix * lines;
    float* group = group_sums(d) + matrix * d.groups;
    std::memset(group, 0, static_cast<size_t>(d.groups) * sizeof(float));
    for (int64_t i = 0; i < lines;) {
      const int64_t owner = d.owners[i];
      double sum = 0;
      for (; i < lines && d.owners[i] == owner; ++i) sum += line[i];
      group[owner] = static_cast<float>(sum);
    }
  }
}

double observe_tile(const Tile& tile, const DaypackOptions& options, float* rows, float* cols) {
  const double coupled = coupled_decay(options);
  if (coupled != 0)
    return kernels().observe_coupled(tile, static_cast<float>(options.sign), static_cast<float>(coupled));
  if (tile.param->v_kind == DAYPACK_BLOCKS) return kernels().observe_blocks(tile, tile.param->sums);
  double total = 0;
  if (has_rows(*tile.param)) {
    kernels().observe(tile, rows, cols);
    for (int64_t r = 0; r < tile.rows(); ++r) total += rows[r];
    return total;
  }
  constexpr int64_t MANY = 256;  // row sums of other second moments are of no further use
  float sums[MANY];
  for (Tile part = tile; part.row < tile.row_end; part.row = part.row_end) {
    part.row_end = part.row + MANY < tile.row_end ? part.row + MANY : tile.row_end;
    kernels().observe(part, sums, nullptr);
    for (int64_t r = 0; r < part.rows(); ++r) total += sums[r];
  }
  return total;
}

void observe(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads, float* totals) {
  const Observation observation(params, count, options);
  observation.run(count, threads);
  const int64_t group = larger(group_of(params, count, count), 1);
  parallel_for(parts(count, group), threads, [&](int64_t index) {
    for (int64_t i = index * group; i < (index + 1) * group && i < count; ++i) totals[i] = observation.reduce(i);
  });
}

}  // namespace daypack
