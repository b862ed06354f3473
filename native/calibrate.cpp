// What is learned from the first gradients: the histogram behind the codebook and the scores of block sizes.
#include <vector>

#include "kernels.h"
#include "pool.h"

void daypack_histogram(const void* grad, int64_t type, int64_t rows, int64_t cols, int64_t block_size, int threads,
                       int64_t* counts) {
  using namespace daypack;
  const int64_t blocks = (cols + block_size - 1) / block_size, all = rows * blocks;
  if (rows * cols < (1 << 16) || threads < 2) return kernels().count(grad, type, cols, block_size, 0, all, counts);
  // Counts can be added in any order. More parts than threads, because a thread may be delayed.
  const int64_t parts = 4 * threads < all ? 4 * threads : all;
  std::vector<int64_t> tables(static_cast<size_t>(parts * BINS));
  parallel_for(parts, threads, [&](int64_t part) {
    kernels().count(grad, type, cols, block_size, all * part / parts, all * (part + 1) / parts,
                    tables.data() + part * BINS);
  });
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t i = 0; i < BINS; ++i) counts[i] += tables[static_cast<size_t>(part * BINS + i)];
}

void daypack_block_scores(const void* grad, int64_t type, int64_t rows, int64_t cols, const int64_t* sizes,
                          int64_t size_count, int threads, double* scores) {
  using namespace daypack;
  // Parts depend on the shape alone: their sums are added in order, whatever the number of threads.
  const int64_t each = rows / 64 + 1, parts = (rows + each - 1) / each;
  std::vector<double> totals(static_cast<size_t>(parts * size_count));
  parallel_for(parts, threads, [&](int64_t part) {
    std::vector<double> prefix(static_cast<size_t>(cols) + 1);
    const int64_t end = (part + 1) * each < rows ? (part + 1) * each : rows;
    kernels().score(grad, type, cols, part * each, end, sizes, size_count, prefix.data(),
                    totals.data() + part * size_count);
  });
  for (int64_t s = 0; s < size_count; ++s) {
    double total = 0;
    for (int64_t part = 0; part < parts; ++part) total += totals[static_cast<size_t>(part * size_count + s)];
    scores[s] = total / (static_cast<double>(rows) * static_cast<double>(cols / sizes[s] - 1));
  }
}
