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

#define DAYPACK_INTERFACE 6

// What both sides must agree on is listed once, as macros: the structs and enums below are made from the lists, and so is
// what daypack_layout tells a caller about them.

#define DAYPACK_TYPES(NUMBER)                     \
  NUMBER(FP32, 0) NUMBER(BF16, 1) NUMBER(FP16, 2)

// Where second moments come from. OWN: each element has one (in fp32 or as a code), or the rule wants none. The others are
// statistics of g^2: ROWS and COLS have one for each group of lines.
#define DAYPACK_SECOND_MOMENTS(NUMBER)                                                 \
  NUMBER(OWN, 0) NUMBER(FACTORED, 1) NUMBER(BLOCKS, 2) NUMBER(ROWS, 3) NUMBER(COLS, 4)

// See src/daypack/rules/.
#define DAYPACK_RULES(NUMBER)                                                                          \
  NUMBER(ADAMW, 0) NUMBER(ADAM, 1) NUMBER(SGD, 2) NUMBER(LION, 3) NUMBER(LAMB, 4) NUMBER(ADAFACTOR, 5)

// LARGEST_BLOCK: codes that share a scale. NO_MEMORY: returned by a step that found no memory for a projection.
#define DAYPACK_LIMITS(NUMBER)                      \
  NUMBER(LARGEST_BLOCK, 4096) NUMBER(NO_MEMORY, -2)

// One parameter: where its tensors are and how they are laid out. All of them are contiguous. Fields are eight bytes
// each, so that the caller can keep a list of parameters as one table of 64-bit numbers.
#define DAYPACK_PARAM_FIELDS(FIELD)                                                                             \
  FIELD(void*, param)                                                                                           \
  FIELD(const void*, grad)                                                                                      \
  FIELD(float*, step)            /* steps taken so far; apply counts it up */                                   \
  FIELD(uint8_t*, codes)         /* first moment as 8-bit codes; null if it is dense, or not kept */            \
  FIELD(void*, scale)            /* one per block of a row: bf16, or fp32 beside a map */                       \
  FIELD(const float*, codebook)  /* 256 levels that were learned; or */                                         \
  FIELD(const void*, map)        /* those known beforehand, from daypack_prepare_map */                         \
  FIELD(float*, exp_avg)         /* dense first moment */                                                       \
  FIELD(float*, exp_avg_sq)      /* dense second moment */                                                      \
  FIELD(uint8_t*, v_codes)       /* second moment as 8-bit codes */                                             \
  FIELD(float*, v_scale)                                                                                        \
  FIELD(const void*, v_map)                                                                                     \
  FIELD(float*, row)             /* second moment of rows, [matrices, rows] */                                  \
  FIELD(float*, col)             /* of columns, [matrices, cols] */                                             \
  FIELD(float*, block)           /* of blocks, [matrices, rows, ceil(cols / v_block_size)] */                   \
  FIELD(const int64_t*, owners)  /* of each line (a row, or a column) the group; rising */                      \
  FIELD(const int64_t*, sizes)   /* lines of each group, on all ranks together */                               \
  FIELD(float*, sums)            /* statistics of g^2, filled by observe: rows, columns, groups; or blocks */   \
  FIELD(double*, squares)        /* of the parameter and of what its rule measures, filled by measure */        \
  FIELD(const float*, basis)     /* of a projection, [min(full_rows, full_cols), rank]; null without one */     \
  FIELD(int64_t*, basis_left)    /* gradients for which it still serves; a step not all zeros counts it down */ \
  FIELD(int64_t, matrices)                                                                                      \
  FIELD(int64_t, rows)                                                                                          \
  FIELD(int64_t, cols)                                                                                          \
  FIELD(int64_t, first)          /* place of the first element in the whole parameter, of which this may be */  \
                                 /* a part: for the dither */                                                   \
  FIELD(int64_t, whole_rows)     /* rows of a matrix on all ranks together, which the columns' sums are over */ \
  FIELD(int64_t, block_size)     /* of the codes' scales; at most DAYPACK_LARGEST_BLOCK */                      \
  FIELD(int64_t, groups)         /* of lines in a matrix */                                                     \
  FIELD(int64_t, numel)          /* of the whole parameter */                                                   \
  FIELD(int64_t, v_block_size)                                                                                  \
  FIELD(int64_t, v_kind)         /* DaypackSecondMoment */                                                      \
  FIELD(int64_t, param_type)     /* DaypackType */                                                              \
  FIELD(int64_t, grad_type)                                                                                     \
  FIELD(int64_t, options)        /* index into the array of DaypackOptions */                                   \
  FIELD(int64_t, rank)           /* of a projection; 0 without one. With one, all else but param, grad and */   \
                                 /* their types is of the stand-in of low rank, and the parameter itself is */  \
                                 /* full_rows x full_cols */                                                    \
  FIELD(int64_t, full_rows)                                                                                     \
  FIELD(int64_t, full_cols)

#define DAYPACK_OPTIONS_FIELDS(FIELD)                                                              \
  FIELD(double, lr)                                                                                \
  FIELD(double, beta1)                                                                             \
  FIELD(double, beta2)                                                                             \
  FIELD(double, eps)                                                                               \
  FIELD(double, weight_decay)                                                                      \
  FIELD(double, sign)             /* -1 to ascend (maximize), else 1 */                            \
  FIELD(double, rule)             /* DaypackRule; beta1 is SGD's momentum */                       \
  FIELD(double, dampening)        /* SGD */                                                        \
  FIELD(double, nesterov)                                                                          \
  FIELD(double, trust_ratio)      /* LAMB */                                                       \
  FIELD(double, beta2_decay)      /* Adafactor */                                                  \
  FIELD(double, relative_step)                                                                     \
  FIELD(double, scale_parameter)                                                                   \
  FIELD(double, smallest_scale)                                                                    \
  FIELD(double, clip)                                                                              \
  FIELD(double, whole_decay)      /* of a projection: weight decay of the parameter itself, and */ \
  FIELD(double, scale)            /* factor of what comes back to it */

#define DAYPACK_NUMBER(name, number) DAYPACK_##name = number,
enum DaypackType { DAYPACK_TYPES(DAYPACK_NUMBER) };
enum DaypackSecondMoment { DAYPACK_SECOND_MOMENTS(DAYPACK_NUMBER) };
enum DaypackRule { DAYPACK_RULES(DAYPACK_NUMBER) };
enum DaypackLimit { DAYPACK_LIMITS(DAYPACK_NUMBER) };
#undef DAYPACK_NUMBER

#define DAYPACK_FIELD(type, name) type name;
struct DaypackParam {
  DAYPACK_PARAM_FIELDS(DAYPACK_FIELD)
};
struct DaypackOptions {
  DAYPACK_OPTIONS_FIELDS(DAYPACK_FIELD)
};
#undef DAYPACK_FIELD

DAYPACK_EXPORT int daypack_interface(void);
// What the library was built with, one line for each struct and enum: its name, then `name=value` for each field or number.
// A field's value is its type and size as numpy writes them (u: pointers), and its offset: `rank=i8@272`; a struct's own
// bytes are called `sizeof`. A caller built for another layout learns from it where they differ.
DAYPACK_EXPORT const char* daypack_layout(void);

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
