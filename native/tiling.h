// How parameters are cut into tiles, and how the tiles of a whole list are handed out to threads.
#pragma once
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace daypack {

constexpr int64_t TASK_ELEMENTS = 1 << 17, DENSE_COLS = 1 << 16, MOST_ROW_PARTS = 64;

inline int64_t parts(int64_t size, int64_t step) { return step > 0 ? (size + step - 1) / step : 0; }

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t elements(const DaypackParam& d) { return d.matrices * d.rows * d.cols; }

// Whether a step needs sums of g^2 over rows (else it does without, or wants them over blocks), and over columns.
inline bool has_rows(const DaypackParam& d) { return d.v_kind != DAYPACK_OWN && d.v_kind != DAYPACK_BLOCKS; }
inline bool has_cols(const DaypackParam& d) { return d.v_kind == DAYPACK_FACTORED || d.v_kind == DAYPACK_COLS; }
inline float* col_sums(const DaypackParam& d) { return d.sums + d.matrices * d.rows; }
inline float* group_sums(const DaypackParam& d) { return has_cols(d) ? col_sums(d) + d.matrices * d.cols : col_sums(d); }

inline bool is_coded(const DaypackParam& d) { return d.codes != nullptr || d.v_codes != nullptr; }

// How one parameter is cut: `align` columns stay together.
struct Tiling {
  int64_t row_step, row_parts, col_step, col_parts, tasks;

  Tiling(const DaypackParam& d, int64_t align, int64_t widest) {
    if (d.v_kind == DAYPACK_OWN && !is_coded(d)) widest = DENSE_COLS;
    col_step = d.cols <= widest ? larger(d.cols, 1) : larger(align, widest / align * align);
    // Enough rows that a column sum written per part costs little, and few enough parts that adding them does.
    row_step = larger(larger(parts(TASK_ELEMENTS, col_step), parts(d.rows, MOST_ROW_PARTS)), 1);
    row_parts = parts(d.rows, row_step);
    col_parts = parts(d.cols, col_step);
    tasks = d.matrices * row_parts * col_parts;
  }

  static Tiling of_observe(const DaypackParam& d) {
    return Tiling(d, d.v_kind == DAYPACK_BLOCKS ? d.v_block_size : 1, SUM_COLS);
  }

  static Tiling of_apply(const DaypackParam& d) { return Tiling(d, is_coded(d) ? d.block_size : 1, TILE_COLS); }

  bool whole_matrices() const { return row_parts == 1 && col_parts == 1; }

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
inline int64_t group_of(const DaypackParam* params, int64_t count, int64_t tasks) {
  int64_t all = 1;
  for (int64_t i = 0; i < count; ++i) all += elements(params[i]);
  return tasks * (TASK_ELEMENTS / 4) / all;
}

}  // namespace daypack
