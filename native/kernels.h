// What each instruction set implements: both passes over one tile of one parameter, and the loops of calibration.
#pragma once
#include "codec.h"
#include "daypack.h"

namespace daypack {

// A rectangle of one matrix of a parameter; columns start at a multiple of whatever must not be cut.
struct Tile {
  const DaypackParam* param;
  int64_t matrix, row, row_end, col, col_end;

  int64_t rows() const { return row_end - row; }
  int64_t cols() const { return col_end - col; }
  int64_t first_row() const { return matrix * param->rows + row; }
  int64_t first() const { return first_row() * param->cols + col; }  // place of the first element
  int64_t v_blocks() const { return (param->cols + param->v_block_size - 1) / param->v_block_size; }
};

// Columns of a tile where nothing else decides: rows are read whole, as far as a buffer of column roots in the second-level
// cache allows; column sums stay in the first-level cache.
constexpr int64_t TILE_COLS = 16384, SUM_COLS = 2048;
static_assert(TILE_COLS >= DAYPACK_LARGEST_BLOCK, "a tile holds at least one block");

constexpr int BINS = 4096;  // of the histogram behind the codebook

// One parameter's step in the numbers that the loops want. `sign` of the gradient is in `weight`.
struct Step {
  float beta1, weight;      // m = beta1 * m + weight * g
  float beta2, weight2;     // v = beta2 * v + weight2 * g^2
  float decay, rate, eps;   // p = decay * p - rate * m / (sqrt(v / correction2) + eps)
  float correction2;
  uint32_t turn;            // of the dither at element 0
  const Codec* codec;       // null where the first moment is dense
  float mean;               // of `col` in the tile's matrix, for a factored second moment
};

// One layer of the dynamic programme behind the codebook (see codebook.cpp), over positions 0..bins.
struct Layer {
  int64_t bins;
  const double *w, *x, *xx;  // sums over the bins before a position of weight times centre^0, 1, 2
  const double* best;        // least error of the bins before a position, in the layer before
  double *next, *scratch;
  int64_t* start;
};

struct Kernels {
  const char* name;
  // Sums of g^2 over the rows and, unless `cols` is null, over the columns of the tile.
  void (*observe)(const Tile& tile, float* rows, float* cols);
  // Sums over blocks of v_block_size columns; returns their total. `sums` has one row of v_blocks() per row of the tensor.
  double (*observe_blocks)(const Tile& tile, float* sums);
  // Moments, rule and parameter; the second moment's statistics are complete.
  void (*apply)(const Tile& tile, const Step& step);
  // The loops of calibration: see learn.h.
  void (*count)(const void* grad, int64_t type, int64_t cols, int64_t block_size, int64_t first, int64_t last,
                int64_t* counts);
  void (*score)(const void* grad, int64_t type, int64_t cols, int64_t row, int64_t row_end, const int64_t* sizes,
                int64_t size_count, double* prefix, double* totals);
  void (*fill_layer)(const Layer& layer);
};

extern const Kernels portable_kernels;
#if defined(DAYPACK_X86)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#endif

// The kernels in use; `select` returns false if this machine has no such instructions.
const Kernels& kernels();
bool select(const char* name);

}  // namespace daypack
