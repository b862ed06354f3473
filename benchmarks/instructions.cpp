// Steps one matrix without Python, for valgrind to count instructions in. Commands in docs/performance.md.
#include <cstdlib>
#include <vector>

#include "../native/daypack.h"

int main(int count, char** arguments) {
  const int64_t rows = 256, cols = 1024, n = rows * cols, blocks = n / 256;
  const int steps = count > 1 ? std::atoi(arguments[1]) : 1;
  std::vector<float> p(n), g(n), levels(256), row(rows), col(cols), sums(rows + cols);
  for (int64_t i = 0; i < n; ++i) g[i] = static_cast<float>((i * 2654435761u) % 65536) / 65536 - 0.5f;
  for (int i = 0; i < 256; ++i) levels[i] = i < 128 ? (i - 128) / 128.0f : i == 255 ? 1.0f : (i - 128) / 128.0f;
  std::vector<uint8_t> codes(n, 128);
  std::vector<uint16_t> scale(blocks);
  float step = 0, total = 0;
  DaypackParam d{};
  d.param = p.data(), d.grad = g.data(), d.step = &step, d.codes = codes.data(), d.scale = scale.data();
  d.codebook = levels.data(), d.row = row.data(), d.col = col.data(), d.sums = sums.data();
  d.matrices = 1, d.rows = rows, d.cols = cols, d.block_size = 256, d.v_kind = DAYPACK_FACTORED;
  const DaypackOptions options{1e-3, 0.9, 0.999, 1e-8, 0.01, 1};
  for (int i = 0; i < steps; ++i)
    if (daypack_step(&d, 1, &options, 1, &total) != -1) return 1;
  return 0;
}
