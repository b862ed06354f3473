// 8-bit maps that are known beforehand, as the tables that encoding to the nearest level and decoding want.
#pragma once
#include <cstdint>

namespace daypack {

// fp32 numbers as integers that rise as they do, cut to their upper 16 bits. No two thresholds have the same key.
inline int16_t key_of(uint32_t bits) {
  const int16_t upper = static_cast<int16_t>(bits >> 16);
  return static_cast<int16_t>(upper ^ ((upper >> 15) & 0x7FFF));
}

struct Map {
  alignas(64) int16_t heap[256];             // keys of the thresholds as a search tree, entry 1 the root; entry 0 unused
  alignas(64) uint8_t level_planes[4][256];  // bytes of the levels
  alignas(64) uint8_t threshold_planes[4][256];
  float level[256];
  float threshold[256];   // between each level and the next; the last one is infinite
  uint8_t below[65536];   // of each upper half of an fp32 number: thresholds whose keys are smaller
  bool is_unsigned;       // it holds second moments, of which none but 0 may be stored as 0
};

}  // namespace daypack
