#include "map.h"

#include <cstring>
#include <limits>

#include "codec.h"
#include "daypack.h"

namespace daypack {
namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

void fill_planes(uint8_t planes[4][256], const float* numbers) {
  for (int i = 0; i < 256; ++i)
    for (int plane = 0; plane < 4; ++plane)
      planes[plane][i] = static_cast<uint8_t>(bits_of(numbers[i]) >> (8 * plane));
}

bool fill(Map& map, const float* levels, const float* thresholds) {
  int16_t keys[256];
  for (int i = 0; i < 255; ++i) {
    if (!(thresholds[i] >= -1 && thresholds[i] <= 1)) return false;
    keys[i] = key_of(bits_of(thresholds[i]));
    if (i > 0 && keys[i] <= keys[i - 1]) return false;
  }
  std::memcpy(map.level, levels, sizeof map.level);
  std::memcpy(map.threshold, thresholds, 255 * sizeof(float));
  map.threshold[255] = std::numeric_limits<float>::infinity();
  map.is_unsigned = levels[0] >= 0;
  map.heap[0] = 0;
  fill_heap(map.heap, keys);
  fill_planes(map.level_planes, map.level);
  fill_planes(map.threshold_planes, map.threshold);
  for (uint32_t upper = 0; upper < 65536; ++upper) {
    int count = 0;
    for (int step = 128; step > 0; step /= 2)
      if (keys[count + step - 1] < key_of(upper << 16)) count += step;
    map.below[upper] = static_cast<uint8_t>(count);
  }
  return true;
}

}  // namespace
}  // namespace daypack

int64_t daypack_map_bytes(void) { return static_cast<int64_t>(sizeof(daypack::Map)); }

int daypack_prepare_map(const float* levels, const float* thresholds, void* map) {
  return daypack::fill(*static_cast<daypack::Map*>(map), levels, thresholds) ? 0 : -1;
}
