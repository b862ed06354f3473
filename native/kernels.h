// What each instruction set implements: both passes over one tile of one parameter, and the loops of calibration. Its code
// is in the headers `*-inl.h`, which kernels_*.cpp include inside a namespace of their own, each with its own flags.
#pragma once
#include "codec.h"
#include "daypack.h"
#include "map.h"

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

// One parameter's step in the numbers that the loops want. Rules read what they know: see rules-inl.h and make_step.
struct Step {
  int rule;                 // DaypackRule
  float sign, coupled;      // the gradient is sign * g + coupled * p
  float beta1, fresh1;      // m = beta1 * m + fresh1 * gradient
  float beta2, fresh2;      // v = beta2 * v + fresh2 * gradient^2
  float decay, rate;        // p = decay * p - rate * direction
  float eps, correction2;   // of the square root of v / correction2
  float ahead, now;         // SGD, Lion: how much of the moment and of the gradient is in the direction
  float unbias, inner;      // LAMB: 1 / (1 - beta1^t), and the decay within the direction
  float clip;               // Adafactor: factor of the normalised gradient
  uint32_t turn;            // of the dither at element 0
  const Codec* codec;       // null unless the first moment has a learned codebook
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

// A matrix, one row after the other.
struct Matrix {
  const void* at;
  int64_t type, rows, cols;  // type: DaypackType
};

enum Factor { NEITHER, LEFT, RIGHT };

// C = a b. It goes to `sums`; or, where that is null, param = kept * param + scale * C.
struct Product {
  Matrix a, b;
  float* sums;
  void* param;
  int64_t type;
  float kept, scale;
  Factor measured;  // whose squares are added up, by the blocks of C that lie along it first; it is read from far memory
};

// C is computed in blocks, each from pieces of `a` and `b` of this depth; `PRODUCT_SCRATCH` floats hold both and the block.
// Blocks are wide and pieces flat, so that rows of far memory are read and written in long runs.
constexpr int64_t PRODUCT_ROWS = 96, PRODUCT_COLS = 512, PRODUCT_DEPTH = 96, PRODUCT_PAD = 16;
constexpr int64_t PRODUCT_SCRATCH =
    PRODUCT_ROWS * (PRODUCT_DEPTH + PRODUCT_PAD) + PRODUCT_DEPTH * PRODUCT_COLS + PRODUCT_ROWS * PRODUCT_COLS;

struct Kernels {
  const char* name;
  // Sums of g^2 over the rows and, unless `cols` is null, over the columns of the tile.
  void (*observe)(const Tile& tile, float* rows, float* cols);
  // Sums over blocks of v_block_size columns; returns their total. `sums` has one row of v_blocks() per row of the tensor.
  double (*observe_blocks)(const Tile& tile, float* sums);
  // Sum of the squares of sign * g + coupled * p.
  double (*observe_coupled)(const Tile& tile, float sign, float coupled);
  // Moments, rule and parameter; the second moment's statistics are complete.
  void (*apply)(const Tile& tile, const Step& step);
  // Adds the squares of the tile's parameters and of what the rule measures to squares[0] and [1].
  void (*measure)(const Tile& tile, const Step& step, double* squares);
  // One block of a product; returns the sum of squares that it added up.
  double (*multiply)(const Product& product, int64_t row, int64_t row_end, int64_t col, int64_t col_end, float* scratch);
  // The loops of calibration: see learn-inl.h.
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
