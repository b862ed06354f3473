// What the first gradients teach: the histogram behind the codebook and the scores of block sizes.
#include <cstring>
#include <vector>

#include "daypack.h"
#include "pool.h"

namespace daypack {
namespace {

#include "numbers.h"

constexpr int BINS = 4096, PIECE = 256, FINEST = 16;

void read(const void* grad, int64_t type, int64_t at, int64_t n, float* out) {
  if (type == DAYPACK_FP32) {
    std::memcpy(out, static_cast<const float*>(grad) + at, static_cast<size_t>(n) * sizeof(float));
  } else {
    const auto* raw = static_cast<const uint16_t*>(grad) + at;
    for (int64_t i = 0; i < n; ++i) out[i] = type == DAYPACK_BF16 ? BFloat16::get(raw[i]) : Float16::get(raw[i]);
  }
}

float absmax(const void* grad, int64_t type, int64_t at, int64_t size) {
  float piece[PIECE];
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; i += PIECE) {
    const int64_t n = size - i < PIECE ? size - i : PIECE;
    read(grad, type, at + i, n, piece);
    for (int64_t k = 0; k < n; ++k) {
      const uint32_t magnitude = bits_of(piece[k]) & 0x7FFFFFFFu;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  return float_of(largest);
}

// Counts of one block's elements over its absmax. Two tables, because equal bins often follow each other, and one bin past
// the last for the zeros, which do not count.
void count_block(const void* grad, int64_t type, int64_t at, int64_t size, int64_t (*counts)[BINS + 1]) {
  const float scale = absmax(grad, type, at, size);
  float piece[PIECE];
  int32_t bin[PIECE];
  for (int64_t i = 0; i < size; i += PIECE) {
    const int64_t n = size - i < PIECE ? size - i : PIECE;
    read(grad, type, at + i, n, piece);
    for (int64_t k = 0; k < n; ++k) {
      const float place = (piece[k] / (scale > 0 ? scale : 1.0f) + 1.0f) * (BINS / 2);
      const int32_t index = static_cast<int32_t>(place);
      bin[k] = piece[k] == 0 ? BINS : index < BINS ? index : BINS - 1;
    }
    int64_t k = 0;
    for (; k + 2 <= n; k += 2) {
      ++counts[0][bin[k]];
      ++counts[1][bin[k + 1]];
    }
    if (k < n) ++counts[0][bin[k]];
  }
}

// Natural logarithm of positive normal numbers, within 2 units in the last place (the polynomial is Cephes').
inline float log_of(float x) {
  const uint32_t bits = bits_of(x);
  // Mantissa in [sqrt(1/2), sqrt(2)).
  const int32_t exponent = static_cast<int32_t>(bits - 0x3F3504F3u) >> 23;
  const float m = float_of(bits - (static_cast<uint32_t>(exponent) << 23)) - 1.0f, e = static_cast<float>(exponent);
  float y = 7.0376836292e-2f;
  for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                        2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    y = y * m + c;
  const float square = m * m;
  return (m + (y * m * square + e * -2.12194440e-4f - 0.5f * square)) + e * 0.693359375f;
}

// Adds one row's distances between the means of neighbouring blocks, for every block size.
void score_row(const float* g, int64_t cols, const int64_t* sizes, int64_t count, double* prefix, double* totals) {
  prefix[0] = 0;
  for (int64_t at = 0; at < cols; at += FINEST) {
    float logs[FINEST];
    for (int k = 0; k < FINEST; ++k) logs[k] = log_of(g[at + k] * g[at + k] + 1e-12f);
    double sum = 0;
    for (int k = 0; k < FINEST; ++k) sum += static_cast<double>(logs[k]);
    prefix[at / FINEST + 1] = prefix[at / FINEST] + sum;
  }
  for (int64_t s = 0; s < count; ++s) {
    const int64_t unit = sizes[s] / FINEST, blocks = cols / sizes[s];
    double total = 0;
    for (int64_t b = 1; b < blocks; ++b) {
      const double step = (prefix[(b + 1) * unit] - prefix[b * unit]) - (prefix[b * unit] - prefix[(b - 1) * unit]);
      total += step < 0 ? -step : step;
    }
    totals[s] += total / static_cast<double>(sizes[s]);
  }
}

}  // namespace
}  // namespace daypack

void daypack_histogram(const void* grad, int64_t type, int64_t rows, int64_t cols, int64_t block_size, int threads,
                       int64_t* counts) {
  using namespace daypack;
  const int64_t blocks = (cols + block_size - 1) / block_size, all = rows * blocks;
  const int64_t parts = all * block_size < (1 << 16) || threads < 1 ? 1 : threads;  // counts add up in any order
  std::vector<int64_t> tables(static_cast<size_t>(parts) * 2 * (BINS + 1));
  parallel_for(parts, threads, [&](int64_t part) {
    auto* table = reinterpret_cast<int64_t(*)[BINS + 1]>(tables.data() + part * 2 * (BINS + 1));
    for (int64_t i = all * part / parts; i < all * (part + 1) / parts; ++i) {
      const int64_t row = i / blocks, col = i % blocks * block_size;
      count_block(grad, type, row * cols + col, cols - col < block_size ? cols - col : block_size, table);
    }
  });
  for (int64_t table = 0; table < 2 * parts; ++table)
    for (int64_t i = 0; i < BINS; ++i) counts[i] += tables[static_cast<size_t>(table * (BINS + 1) + i)];
}

void daypack_block_scores(const void* grad, int64_t type, int64_t rows, int64_t cols, const int64_t* sizes,
                          int64_t size_count, int threads, double* scores) {
  using namespace daypack;
  // Parts depend on the shape alone: their sums are added in order, whatever the number of threads.
  const int64_t each = rows / 64 + 1, parts = (rows + each - 1) / each;
  std::vector<double> totals(static_cast<size_t>(parts * size_count));
  parallel_for(parts, threads, [&](int64_t part) {
    std::vector<float> row(static_cast<size_t>(cols));
    std::vector<double> prefix(static_cast<size_t>(cols / FINEST) + 1);
    const int64_t end = (part + 1) * each < rows ? (part + 1) * each : rows;
    for (int64_t r = part * each; r < end; ++r) {
      read(grad, type, r * cols, cols, row.data());
      score_row(row.data(), cols, sizes, size_count, prefix.data(), totals.data() + part * size_count);
    }
  });
  for (int64_t s = 0; s < size_count; ++s) {
    double total = 0;
    for (int64_t part = 0; part < parts; ++part) total += totals[static_cast<size_t>(part * size_count + s)];
    scores[s] = total / (static_cast<double>(rows) * static_cast<double>(cols / sizes[s] - 1));
  }
}
