// Both passes over a list of parameters: cut into tiles, run in parallel, partial sums added in a fixed order. What is
// computed depends on the shapes alone, never on the number of threads.
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace daypack {
namespace {

constexpr int64_t TASK_ELEMENTS = 1 << 17, DENSE_COLS = 1 << 16, COMBINE_COLS = 1 << 14, MOST_ROW_PARTS = 64;

int64_t parts(int64_t size, int64_t step) { return step > 0 ? (size + step - 1) / step : 0; }

int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// How one parameter is cut: `align` columns stay together.
struct Tiling {
  int64_t row_step, row_parts, col_step, col_parts, tasks;

  Tiling(const DaypackParam& d, int64_t align, int64_t widest) {
    if (d.v_kind == DAYPACK_DENSE && d.codes == nullptr) widest = DENSE_COLS;
    col_step = d.cols <= widest ? larger(d.cols, 1) : larger(align, widest / align * align);
    // Enough rows that a column sum written per part costs little, and few enough parts that adding them does.
    row_step = larger(larger(parts(TASK_ELEMENTS, col_step), parts(d.rows, MOST_ROW_PARTS)), 1);
    row_parts = parts(d.rows, row_step);
    col_parts = parts(d.cols, col_step);
    tasks = d.matrices * row_parts * col_parts;
  }

  Tile tile(const DaypackParam& d, int64_t index) const {
    const int64_t col = index % col_parts, row = index / col_parts % row_parts;
    const auto end = [](int64_t part, int64_t step, int64_t size) {
      return (part + 1) * step < size ? (part + 1) * step : size;
    };
    return {&d,
            index / (col_parts * row_parts),
            row * row_step,
            end(row, row_step, d.rows),
            col * col_step,
            end(col, col_step, d.cols)};
  }
};

// Numbered tasks of a whole list: task i of the list is task `i - first` of parameter `owner`.
class TaskList {
 public:
  explicit TaskList(int64_t params) { first_.reserve(static_cast<size_t>(params) + 1), first_.push_back(0); }
  void add(int64_t tasks) { first_.push_back(first_.back() + tasks); }
  int64_t count() const { return first_.back(); }

  // function(parameter, task of that parameter) for every task, in groups large enough to be worth handing out.
  template <class Function>
  void run(int64_t group, int threads, const Function& function) const {
    group = larger(group, 1);
    parallel_for(parts(count(), group), threads, [&](int64_t index) {
      int64_t task = index * group, owner = find(task);
      const int64_t end = task + group < count() ? task + group : count();
      for (; task < end; ++task) {
        while (task >= first_[static_cast<size_t>(owner) + 1]) ++owner;
        function(owner, task - first_[static_cast<size_t>(owner)]);
      }
    });
  }

 private:
  int64_t find(int64_t task) const {
    size_t low = 0, high = first_.size() - 1;
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      (first_[middle] <= task ? low : high) = middle;
    }
    return static_cast<int64_t>(low);
  }
  std::vector<int64_t> first_;
};

// Tasks to hand out at once: many small parameters are one piece of work, a large one is several.
int64_t group_of(const DaypackParam* params, int64_t count, int64_t tasks) {
  int64_t elements = 1;
  for (int64_t i = 0; i < count; ++i) elements += params[i].matrices * params[i].rows * params[i].cols;
  return tasks * (TASK_ELEMENTS / 4) / elements;
}

// ------------------------------------------------------------------ observe

// Partial sums of one parameter in the scratch buffer; where there is one part only, the result itself.
struct Partial {
  float *rows, *cols;
  double* totals;
};

void observe_tile(const DaypackParam& d, const Tiling& tiling, const Partial& partial, int64_t index) {
  const Tile tile = tiling.tile(d, index);
  if (d.v_kind == DAYPACK_BLOCKS) {
    partial.totals[index] = kernels().observe_blocks(tile, d.sums);
    return;
  }
  const int64_t row_part = tile.row / tiling.row_step, col_part = tile.col / tiling.col_step;
  float* rows = partial.rows + (col_part * d.matrices + tile.matrix) * d.rows + tile.row;
  float* cols = d.v_kind == DAYPACK_DENSE ? nullptr
                                          : partial.cols + (row_part * d.matrices + tile.matrix) * d.cols + tile.col;
  kernels().observe(tile, rows, cols);
  double total = 0;
  for (int64_t r = 0; r < tile.rows(); ++r) total += rows[r];
  partial.totals[index] = total;
}

void add_parts(float* sums, const float* part, int64_t size, int64_t count) {
  if (count == 1) return;  // it is the result already
  for (int64_t i = 0; i < size; ++i) {
    float sum = part[i];
    for (int64_t k = 1; k < count; ++k) sum += part[k * size + i];
    sums[i] = sum;
  }
}

// Long rows have many parts: added in double.
void add_row_parts(float* sums, const float* part, int64_t size, int64_t count) {
  if (count == 1) return;
  for (int64_t i = 0; i < size; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < count; ++k) sum += part[k * size + i];
    sums[i] = static_cast<float>(sum);
  }
}

float reduce(const DaypackParam& d, const Tiling& tiling, const Partial& partial) {
  if (d.v_kind == DAYPACK_FACTORED) {
    add_row_parts(d.sums, partial.rows, d.matrices * d.rows, tiling.col_parts);
    add_parts(d.sums + d.matrices * d.rows, partial.cols, d.matrices * d.cols, tiling.row_parts);
  }
  double total = 0;
  for (int64_t i = 0; i < tiling.tasks; ++i) total += partial.totals[i];
  return static_cast<float>(total);
}

// -------------------------------------------------------------------- apply

struct Prepared {
  Step step;
  Tiling tiling;
  bool active, together;  // together: one task combines a matrix's statistics and uses them at once
  float* mean;
  double* mean_parts;     // per matrix and COMBINE_COLS columns
  float lerp;             // 1 - beta2
};

Step make_step(const DaypackOptions& o, double taken) {
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
  return s;
}

void average(float* mean, const float* sums, int64_t count, float divisor, float lerp) {
  for (int64_t i = 0; i < count; ++i) {
    const float now = sums[i] / divisor, change = now - mean[i];
    mean[i] = lerp < 0.5f ? mean[i] + lerp * change : now - (1 - lerp) * change;  // exact at both ends
  }
}

// New row means and block means of some rows of one matrix.
void combine_rows(const DaypackParam& d, const Prepared& p, int64_t matrix, int64_t row, int64_t row_end) {
  const int64_t line = matrix * d.rows + row, count = row_end - row;
  if (d.v_kind == DAYPACK_FACTORED) average(d.row + line, d.sums + line, count, static_cast<float>(d.cols), p.lerp);
  if (d.v_kind != DAYPACK_BLOCKS) return;
  const int64_t blocks = parts(d.cols, d.v_block_size), last = d.cols - (blocks - 1) * d.v_block_size;
  for (int64_t at = line * blocks; at < (line + count) * blocks; at += blocks) {
    average(d.block + at, d.sums + at, blocks - 1, static_cast<float>(d.v_block_size), p.lerp);
    average(d.block + at + blocks - 1, d.sums + at + blocks - 1, 1, static_cast<float>(last), p.lerp);
  }
}

// New column means of some columns of one matrix; returns their sum.
double combine_cols(const DaypackParam& d, const Prepared& p, int64_t matrix, int64_t col, int64_t col_end) {
  const int64_t at = matrix * d.cols + col;
  average(d.col + at, d.sums + d.matrices * d.rows + at, col_end - col, static_cast<float>(d.rows), p.lerp);
  double sum = 0;
  for (int64_t i = 0; i < col_end - col; ++i) sum += d.col[at + i];
  return sum;
}

void apply_tile(const DaypackParam& d, const Prepared& p, int64_t index) {
  const Tile tile = p.tiling.tile(d, index);
  if (p.together) {
    combine_rows(d, p, tile.matrix, tile.row, tile.row_end);
    if (d.v_kind == DAYPACK_FACTORED)
      p.mean[tile.matrix] =
          static_cast<float>(combine_cols(d, p, tile.matrix, 0, d.cols) / static_cast<double>(d.cols));
  }
  kernels().apply(tile, p.step);
}

// Codebooks are equal as a rule: a new set of tables only where one differs from the first and from the one before it.
bool prepare_codecs(const DaypackParam* params, int64_t count, int threads, std::vector<Prepared>& prepared,
                    std::vector<std::unique_ptr<Codec>>& codecs, int64_t* bad) {
  constexpr int64_t GROUP = 64;
  const auto needs = [&](int64_t i) { return params[i].codes != nullptr && prepared[static_cast<size_t>(i)].active; };
  const auto equal = [&](int64_t i, const Codec& codec) {
    return std::memcmp(codec.level, params[i].codebook, sizeof codec.level) == 0;
  };
  int64_t first = 0;
  while (first < count && !needs(first)) ++first;
  if (first == count) return true;
  codecs.push_back(std::make_unique<Codec>());
  const Codec* common = codecs[0].get();
  if (*bad = first; !prepare(*codecs[0], params[first].codebook)) return false;
  parallel_for(parts(count - first, GROUP), threads, [&](int64_t part) {
    for (int64_t i = first + part * GROUP; i < count && i < first + (part + 1) * GROUP; ++i)
      if (needs(i)) prepared[static_cast<size_t>(i)].step.codec = equal(i, *common) ? common : nullptr;
  });
  for (int64_t i = first; i < count; ++i) {
    Prepared& p = prepared[static_cast<size_t>(i)];
    if (!needs(i) || p.step.codec != nullptr) continue;
    if (!equal(i, *codecs.back())) {
      codecs.push_back(std::make_unique<Codec>());
      if (*bad = i; !prepare(*codecs.back(), params[i].codebook)) return false;
    }
    p.step.codec = codecs.back().get();
  }
  return true;
}

}  // namespace

int64_t observe(const DaypackParam* params, int64_t count, int threads, float* totals) {
  std::vector<Tiling> tilings;
  std::vector<Partial> partials(static_cast<size_t>(count));
  tilings.reserve(static_cast<size_t>(count));
  TaskList tasks(count);
  int64_t floats = 0, doubles = 0;
  for (int64_t i = 0; i < count; ++i) {
    const DaypackParam& d = params[i];
    tilings.emplace_back(d, d.v_kind == DAYPACK_BLOCKS ? d.v_block_size : 1, SUM_COLS);
    tasks.add(tilings.back().tasks);
  }
  // First the sizes, then the places.
  std::vector<float> scratch;
  std::vector<double> task_totals(static_cast<size_t>(tasks.count()));
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 1) scratch.resize(static_cast<size_t>(floats));
    floats = doubles = 0;
    for (int64_t i = 0; i < count; ++i) {
      const DaypackParam& d = params[i];
      const Tiling& t = tilings[static_cast<size_t>(i)];
      const bool factored = d.v_kind == DAYPACK_FACTORED;
      const auto place = [&](int64_t size, float* result) {
        float* at = result != nullptr ? result : scratch.data() + floats;
        floats += result != nullptr ? 0 : size;
        return at;
      };
      Partial& partial = partials[static_cast<size_t>(i)];
      partial.totals = task_totals.data() + doubles;
      doubles += t.tasks;
      if (d.v_kind == DAYPACK_BLOCKS) continue;
      partial.rows = place(t.col_parts * d.matrices * d.rows, factored && t.col_parts == 1 ? d.sums : nullptr);
      if (factored)
        partial.cols = place(t.row_parts * d.matrices * d.cols, t.row_parts == 1 ? d.sums + d.matrices * d.rows : nullptr);
    }
  }
  tasks.run(group_of(params, count, tasks.count()), threads, [&](int64_t owner, int64_t task) {
    observe_tile(params[owner], tilings[static_cast<size_t>(owner)], partials[static_cast<size_t>(owner)], task);
  });
  const int64_t group = group_of(params, count, count);
  parallel_for(parts(count, larger(group, 1)), threads, [&](int64_t index) {
    const int64_t end = (index + 1) * larger(group, 1);
    for (int64_t i = index * larger(group, 1); i < end && i < count; ++i)
      totals[i] = reduce(params[i], tilings[static_cast<size_t>(i)], partials[static_cast<size_t>(i)]);
  });
  int64_t failed = 0;
  for (int64_t i = 0; i < count; ++i) failed += !std::isfinite(totals[i]);
  return failed;
}

int64_t apply(const DaypackParam* params, int64_t count, const DaypackOptions* options, const uint8_t* active,
              int threads) {
  std::vector<Prepared> prepared;
  std::vector<std::unique_ptr<Codec>> codecs;
  prepared.reserve(static_cast<size_t>(count));
  TaskList tasks(count), combines(count);
  size_t means = 0, mean_parts = 0;
  Step last{};
  double last_taken = 0;
  const auto combine_parts = [](const DaypackParam& d) {
    return d.v_kind == DAYPACK_FACTORED ? parts(d.cols, COMBINE_COLS) : 1;
  };
  for (int64_t i = 0; i < count; ++i) {
    const DaypackParam& d = params[i];
    const bool on = active == nullptr || active[i] != 0;
    // Most parameters of a group are at the same step.
    const double taken = static_cast<double>(*d.step) + 1;
    if (i == 0 || taken != last_taken || d.options != params[i - 1].options) last = make_step(options[d.options], taken);
    last_taken = taken;
    prepared.push_back({last, Tiling(d, d.codes != nullptr ? d.block_size : 1, TILE_COLS), on, true,
                        nullptr, nullptr, static_cast<float>(1 - options[d.options].beta2)});
    Prepared& p = prepared.back();
    p.together = d.v_kind == DAYPACK_DENSE || (p.tiling.col_parts == 1 && (p.tiling.row_parts == 1 || d.v_kind == DAYPACK_BLOCKS));
    tasks.add(on ? p.tiling.tasks : 0);
    combines.add(on && !p.together ? d.matrices * combine_parts(d) : 0);
    means += static_cast<size_t>(d.matrices);
    mean_parts += static_cast<size_t>(d.matrices * combine_parts(d));
  }
  int64_t bad = -1;
  if (!prepare_codecs(params, count, threads, prepared, codecs, &bad)) return bad;
  std::vector<float> mean(means);
  std::vector<double> mean_part(mean_parts);
  means = mean_parts = 0;
  for (int64_t i = 0; i < count; ++i) {
    Prepared& p = prepared[static_cast<size_t>(i)];
    p.step.mean = p.mean = mean.data() + means;
    p.mean_parts = mean_part.data() + mean_parts;
    means += static_cast<size_t>(params[i].matrices);
    mean_parts += static_cast<size_t>(params[i].matrices * combine_parts(params[i]));
  }
  combines.run(1, threads, [&](int64_t owner, int64_t task) {
    const DaypackParam& d = params[owner];
    const Prepared& p = prepared[static_cast<size_t>(owner)];
    const int64_t each = combine_parts(d), matrix = task / each, part = task % each;
    if (part == 0) combine_rows(d, p, matrix, 0, d.rows);
    const int64_t end = (part + 1) * COMBINE_COLS;
    if (d.v_kind == DAYPACK_FACTORED)
      p.mean_parts[task] = combine_cols(d, p, matrix, part * COMBINE_COLS, end < d.cols ? end : d.cols);
  });
  for (int64_t i = 0; i < count; ++i) {
    const DaypackParam& d = params[i];
    const Prepared& p = prepared[static_cast<size_t>(i)];
    if (!p.active) continue;
    *d.step += 1;
    if (p.together || d.v_kind != DAYPACK_FACTORED) continue;
    for (int64_t matrix = 0; matrix < d.matrices; ++matrix) {
      double sum = 0;
      for (int64_t k = 0; k < combine_parts(d); ++k) sum += p.mean_parts[matrix * combine_parts(d) + k];
      p.mean[matrix] = static_cast<float>(sum / static_cast<double>(d.cols));
    }
  }
  tasks.run(group_of(params, count, tasks.count()), threads, [&](int64_t owner, int64_t task) {
    apply_tile(params[owner], prepared[static_cast<size_t>(owner)], task);
  });
  return -1;
}

int64_t step(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads, float* totals) {
  constexpr int64_t WAVE_BYTES = 8 << 20;  // of gradients: a part of a third-level cache that others use too
  Codec scratch;
  const float* known = nullptr;  // every codebook is checked before anything changes
  for (int64_t i = 0; i < count; ++i) {
    const float* levels = params[i].codes != nullptr ? params[i].codebook : nullptr;
    if (levels == nullptr || (known != nullptr && std::memcmp(known, levels, sizeof scratch.level) == 0)) continue;
    if (!prepare(scratch, levels)) return i;
    known = levels;
  }
  std::vector<uint8_t> active(static_cast<size_t>(count));
  for (int64_t first = 0, end; first < count; first = end) {
    int64_t bytes = 0;
    for (end = first; end < count && (end == first || bytes < WAVE_BYTES); ++end)
      bytes += params[end].matrices * params[end].rows * params[end].cols * (params[end].grad_type == DAYPACK_FP32 ? 4 : 2);
    observe(params + first, end - first, threads, totals + first);
    for (int64_t i = first; i < end; ++i) active[static_cast<size_t>(i)] = std::isfinite(totals[i]);
    apply(params + first, end - first, options, active.data() + first, threads);
  }
  return -1;
}

}  // namespace daypack

int daypack_interface(void) { return DAYPACK_INTERFACE; }

int daypack_param_bytes(void) { return static_cast<int>(sizeof(DaypackParam)); }

const char* daypack_cpu(void) { return daypack::kernels().name; }

int daypack_use_cpu(const char* name) { return daypack::select(name) ? 0 : -1; }

int64_t daypack_observe(const DaypackParam* params, int64_t count, int threads, float* totals) {
  return daypack::observe(params, count, threads, totals);
}

int64_t daypack_step(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads, float* totals) {
  return daypack::step(params, count, options, threads, totals);
}

int64_t daypack_apply(const DaypackParam* params, int64_t count, const DaypackOptions* options, const uint8_t* active,
                      int threads) {
  return daypack::apply(params, count, options, active, threads);
}
