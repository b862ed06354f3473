#include "codec.h"

#include <cstring>

namespace daypack {
namespace {

// In-order walk of a complete binary tree of 255 nodes.
int fill(int16_t* heap, const int16_t* rising, int node, int next) {
  if (node > 255) return next;
  next = fill(heap, rising, 2 * node, next);
  heap[node] = rising[next];
  return fill(heap, rising, 2 * node + 1, next + 1);
}

}  // namespace

void fill_heap(int16_t* heap, const int16_t* rising) { fill(heap, rising, 1, 0); }

bool prepare(Codec& codec, const float* levels) {
  std::memcpy(codec.level, levels, sizeof codec.level);
  int32_t grid[257];
  bool blank = true;
  for (int i = 0; i < 256; ++i) {
    const float place = levels[i] * GRID;
    if (!(place >= -GRID && place <= GRID)) return false;
    grid[i] = static_cast<int32_t>(place);
    if (static_cast<float>(grid[i]) != place) return false;
    blank = blank && grid[i] == 0;
  }
  grid[256] = 2 * GRID - 1;  // above every value
  for (int i = 0; i < 255 && !blank; ++i)
    if (grid[i + 1] - grid[i] < GAP) return false;
  if (!blank && (grid[0] != -GRID || grid[255] != GRID)) return false;
  for (int i = 0; i < 256; ++i) {
    const int32_t gap = grid[i + 1] - grid[i];
    codec.low[i] = static_cast<uint8_t>(grid[i] & 0xFF);
    codec.high[i] = static_cast<uint8_t>((grid[i] >> 8) & 0xFF);
    codec.gap_low[i] = static_cast<uint8_t>(gap & 0xFF);
    codec.gap_high[i] = static_cast<uint8_t>((gap >> 8) & 0xFF);
    codec.rung[i] = static_cast<uint32_t>(grid[i] + GRID) | static_cast<uint32_t>(gap) << 16;
  }
  int16_t thresholds[255];
  for (int i = 0; i < 255; ++i) thresholds[i] = static_cast<int16_t>(grid[i + 1] - 1);
  codec.heap[0] = 0;
  fill_heap(codec.heap, thresholds);
  for (int i = 0; i < 256; ++i) {
    const int32_t end = i < 255 ? grid[i + 1] : GRID + 1;
    if (end > grid[i]) std::memset(codec.below + grid[i] + GRID, i, static_cast<size_t>(end - grid[i]));
  }
  return true;
}

}  // namespace daypack
