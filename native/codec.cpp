#include "codec.h"

#include <cstring>

namespace daypack {
namespace {

// In-order walk of a complete binary tree of 255 nodes: the thresholds, rising.
int fill_heap(int16_t* heap, const int32_t* grid, int node, int next) {
  if (node > 255) return next;
  next = fill_heap(heap, grid, 2 * node, next);
  heap[node] = static_cast<int16_t>(grid[next] - 1);
  return fill_heap(heap, grid, 2 * node + 1, next + 1);
}

}  // namespace

bool prepare(Codec& codec, const float* levels) {
  std::memcpy(codec.level, levels, sizeof codec.level);
  bool blank = true;
  for (int i = 0; i < 256; ++i) {
    const float place = levels[i] * GRID;
    if (!(place >= -GRID && place <= GRID)) return false;
    codec.grid[i] = static_cast<int32_t>(place);
    if (static_cast<float>(codec.grid[i]) != place) return false;
    blank = blank && codec.grid[i] == 0;
    codec.low[i] = static_cast<uint8_t>(codec.grid[i] & 0xFF);
    codec.high[i] = static_cast<uint8_t>((codec.grid[i] >> 8) & 0xFF);
  }
  codec.grid[256] = 2 * GRID - 1;
  for (int i = 0; i < 255 && !blank; ++i)
    if (codec.grid[i + 1] - codec.grid[i] < GAP) return false;
  if (!blank && (codec.grid[0] != -GRID || codec.grid[255] != GRID)) return false;
  for (int i = 0; i < 256; ++i) {
    const int32_t gap = codec.grid[i + 1] - codec.grid[i];
    codec.gap_low[i] = static_cast<uint8_t>(gap & 0xFF);
    codec.gap_high[i] = static_cast<uint8_t>((gap >> 8) & 0xFF);
  }
  codec.heap[0] = 0;
  fill_heap(codec.heap, codec.grid, 1, 1);
  int code = 0;
  for (int i = 0; i < static_cast<int>(sizeof codec.cell); ++i) {
    while (code < 255 && codec.grid[code + 1] <= i * GAP - GRID) ++code;
    codec.cell[i] = static_cast<uint8_t>(code);
  }
  return true;
}

}  // namespace daypack
