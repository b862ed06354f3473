// The 8-bit codebook as the tables that encoding and decoding want.
#pragma once
#include <cstdint>

namespace daypack {

// Levels are multiples of 1 / GRID, at least GAP of them apart; values have FRACTION_BITS more before they are rounded.
constexpr int GRID = 1 << 14;
constexpr int GAP = GRID >> 12;
constexpr int FRACTION_BITS = 16;
constexpr float FIXED = static_cast<float>(GRID) * (1 << FRACTION_BITS);

// Steps of the dither: see dither() in formats/block_quantized.py.
constexpr uint32_t DITHER_INDEX = 0xC13FA9A9u, DITHER_STEP = 0x91E10DA5u;

struct Codec {
  alignas(64) int16_t heap[256];  // thresholds less one as a search tree, entry 1 the root; entry 0 unused
  alignas(64) uint8_t low[256];   // grid[code] as two planes of bytes
  alignas(64) uint8_t high[256];
  alignas(64) uint8_t gap_low[256];  // distance to the next level, likewise
  alignas(64) uint8_t gap_high[256];
  float level[256];
  // Of each code: its grid point above -GRID in the low half, the distance to the next level in the high half.
  uint32_t rung[256];
  uint8_t below[2 * GRID + 1];  // of each grid point above -GRID the code of the level at or below it
};

// Arrange 255 rising numbers as a binary search tree whose root is entry 1.
void fill_heap(int16_t* heap, const int16_t* rising);

// Fill `codec` from 256 levels; false if they are not usable (all zeros, a codebook not learned yet, is).
bool prepare(Codec& codec, const float* levels);

}  // namespace daypack
