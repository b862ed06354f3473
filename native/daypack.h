// The C interface of the native kernels. Plain C types only: no Python, no torch, so one library serves every version
// of both. Every function is safe to call without the GIL and from several threads.
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define DAYPACK_EXPORT extern "C" __declspec(dllexport)
#else
#define DAYPACK_EXPORT extern "C" __attribute__((visibility("default")))
#endif

#define DAYPACK_INTERFACE 5

enum DaypackType { DAYPACK_FP32 = 0, DAYPACK_BF16 = 1, DAYPACK_FP16 = 2 };
// Where second moments come from. OWN: each element has one (in fp32 or as a code), or the rule wants none. The others are
// statistics of g^2: ROWS and COLS have one for each group of lines.
enum DaypackSecondMoment { DAYPACK_OWN = 0, DAYPACK_FACTORED = 1, DAYPACK_BLOCKS = 2, DAYPACK_ROWS = 3, DAYPACK_COLS = 4 };
// See src/daypack/rules.py.
enum DaypackRule { DAYPACK_ADAMW = 0, DAYPACK_ADAM, DAYPACK_SGD, DAYPACK_LION, DAYPACK_LAMB, DAYPACK_ADAFACTOR };

// One parameter: where its tensors are and how they are laid out. All of them are contiguous. Fields are eight bytes
// each, so that the caller can keep a list of parameters as one table of 64-bit numbers.
struct DaypackParam {
  void* param;
  const void* grad;
  float* step;            // steps taken so far; apply counts it up
  uint8_t* codes;         // first moment as 8-bit codes; null if it is dense, or not kept
  void* scale;            // one per block of a row: bf16, or fp32 beside a map
  const float* codebook;  // 256 levels that were learned; or
  const void* map;        // those known beforehand, from daypack_prepare_map
  float* exp_avg;         // dense first moment
  float* exp_avg_sq;      // dense second moment
  uint8_t* v_codes;       // second moment as 8-bit codes
  float* v_scale;
  const void* v_map;
  float* row;             // second moment of rows, [matrices, rows]
  float* col;             // of columns, [matrices, cols]
  float* block;           // of blocks, [matrices, rows, ceil(cols / v_block_size)]
  const int64_t* owners;  // of each line (a row, or a column) the group; rising
  const int64_t* sizes;   // lines of each group, on all ranks together
  float* sums;            // statistics of g^2, filled by observe: rows, columns, groups; or blocks
  double* squares;        // of the parameter and of what its rule measures, filled by measure
  const float* basis;     // of a projection, [min(full_rows, full_cols), rank]; null without one
  int64_t* basis_left;    // gradients for which it still serves; a step that is not all zeros counts it down
  int64_t matrices, rows, cols;
  int64_t first;          // place of the first element in the whole parameter, of which this may be a part: for the dither
  int64_t whole_rows;     // rows of a matrix on all ranks together, which the columns' sums are over
  int64_t block_size;     // of the codes' scales; at most DAYPACK_LARGEST_BLOCK
  int64_t groups;         // of lines in a matrix
  int64_t numel;          // of the whole parameter
  int64_t v_block_size;
  int64_t v_kind;         // DaypackSecondMoment
  int64_t param_type, grad_type;
  int64_t options;        // index into the array of DaypackOptions
  int64_t rank;           // of a projection; 0 without one. With one, all else but param, grad and their types is of the
                          // stand-in of low rank, and the parameter itself is full_rows x full_cols
  int64_t full_rows, full_cols;
};

struct DaypackOptions {
  double lr, beta1, beta2, eps, weight_decay;
  double sign;  // -1 to ascend (maximize), else 1
  double rule;  // DaypackRule; beta1 is SGD's momentum
  double dampening, nesterov;                                             // SGD
  double trust_ratio;                                                     // LAMB
  double beta2_decay, relative_step, scale_parameter, smallest_scale, clip;  // Adafactor
  double whole_decay, scale;  // of a projection: weight decay of the parameter itself, and factor of what comes back to it
};

#define DAYPACK_LARGEST_BLOCK 4096

DAYPACK_EXPORT int daypack_interface(void);
// Bytes of DaypackParam, so that a caller built for another layout notices.
DAYPACK_EXPORT int daypack_param_bytes(void);

// The instruction set in use: "portable", "avx2" or "avx512". `use_cpu` sets it (null: the best one) and returns 0, or
// returns -1 and changes nothing if this machine lacks it.
DAYPACK_EXPORT const char* daypack_cpu(void);
DAYPACK_EXPORT int daypack_use_cpu(const char* name);

// Whether the number at each of `places` is the one in `numbers`: 1 or 0.
DAYPACK_EXPORT int daypack_numbers_are(const int64_t* const* places, const int64_t* numbers, int64_t count);

// The function aoti_torch_get_data_ptr of torch's C interface for tensors. Returns 0, or an error.
typedef int32_t (*DaypackDataPtr)(void* tensor, void** result);

// Where each of torch's tensor handles has its elements. Returns 0, or -1.
DAYPACK_EXPORT int daypack_look(DaypackDataPtr data_ptr, void* const* tensors, int64_t count, int threads, void** places);

// Run on the threads of an OpenMP runtime: `gomp_parallel` is its GOMP_parallel. Null: on threads of our own.
DAYPACK_EXPORT void daypack_borrow_threads(void* gomp_parallel);

// Tables for 256 known levels and the 255 thresholds between them, in `map_bytes` bytes aligned to 64. Returns 0, or -1 if
// the levels are not usable.
DAYPACK_EXPORT int64_t daypack_map_bytes(void);
DAYPACK_EXPORT int daypack_prepare_map(const float* levels, const float* thresholds, void* map);

// -1 if the codebooks of the parameters that `active` marks (null: all) are usable, or the index of one whose is not.
DAYPACK_EXPORT int64_t daypack_check(const DaypackParam* params, int64_t count, const uint8_t* active, int threads);

// First pass: fills every `sums` and `totals[i]`, the sum of g^2 in fp32: not finite exactly if the gradient is not, or if
// its square leaves the range.
DAYPACK_EXPORT void daypack_observe(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads,
                                    float* totals);

// Between the passes, for rules that measure whole tensors: statistics become second moments, and `squares` are filled, both
// for the parameters that `active` marks (null: all). `apply` reads the squares, which may have been added up over ranks.
// Returns as `apply` does.
DAYPACK_EXPORT int64_t daypack_measure(const DaypackParam* params, int64_t count, const DaypackOptions* options,
                                       const uint8_t* active, int threads);

// Second pass: moments, rule, decay and parameters of those that `active` marks (null: all). Returns -1, or the index of a
// parameter whose codebook is not usable, or DAYPACK_NO_MEMORY if there is none for a projection; nothing has changed then.
#define DAYPACK_NO_MEMORY (-2)
DAYPACK_EXPORT int64_t daypack_apply(const DaypackParam* params, int64_t count, const DaypackOptions* options,
                                     const uint8_t* active, int threads);

// Both passes, a few parameters at a time, so that a gradient is still in the cache when it is read again. Parameters whose
// total is not finite are left as they are. Returns as `apply` does.
DAYPACK_EXPORT int64_t daypack_step(const DaypackParam* params, int64_t count, const DaypackOptions* options, int threads,
                                    float* totals);

// Calibration. `histogram` adds to 4,096 counts; `block_scores` fills one score per candidate size (multiples of 16 that
// divide cols); `codebook` finds the free levels of both halves of a histogram and returns how many it wrote.
DAYPACK_EXPORT void daypack_histogram(const void* grad, int64_t type, int64_t rows, int64_t cols, int64_t block_size,
                                      int threads, int64_t* counts);
DAYPACK_EXPORT void daypack_block_scores(const void* grad, int64_t type, int64_t rows, int64_t cols,
                                         const int64_t* sizes, int64_t size_count, int threads, double* scores);
DAYPACK_EXPORT int64_t daypack_codebook(const double* weights, int64_t bins, int64_t levels, int threads,
                                        double* values);
