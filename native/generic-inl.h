// The loops of statistics and codecs over one block or one row, in plain C++ that compilers vectorise. Included once per
// instruction set, inside a namespace of its own (see numbers-inl.h). Sums go through LANES partial sums, so their order
// does not depend on the compiler.

namespace generic {

constexpr int LANES = 16;

static inline float sum_lanes(const float* lanes) {
  float part[8];
  for (int i = 0; i < 8; ++i) part[i] = lanes[i] + lanes[i + 8];
  return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

// Sum of squares of n elements; adds each square to cols[i] if COLS.
template <class G, bool COLS>
static inline float observe_row(const typename G::Raw* __restrict g, int64_t n, float* __restrict cols) {
  float lanes[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int k = 0; k < LANES; ++k) {
      const float x = G::get(g[i + k]);
      const float square = x * x;
      lanes[k] += square;
      if (COLS) cols[i + k] += square;
    }
  }
  for (int k = 0; i < n; ++i, ++k) {
    const float x = G::get(g[i]);
    lanes[k] += x * x;
    if (COLS) cols[i] += x * x;
  }
  return sum_lanes(lanes);
}

// All rows of a tile. `cols` holds zeros before; sums over many rows are added in groups to keep them exact.
template <class G>
static inline void observe_rows(const typename G::Raw* g, int64_t stride, int64_t rows, int64_t n, float* row_sums,
                                float* cols) {
  constexpr int GROUP = 64;
  alignas(64) float group[SUM_COLS];
  for (int64_t i = 0; i < n; ++i) cols[i] = 0;
  for (int64_t r = 0; r < rows;) {
    for (int64_t i = 0; i < n; ++i) group[i] = 0;
    const int64_t end = r + GROUP < rows ? r + GROUP : rows;
    for (; r < end; ++r) row_sums[r] = observe_row<G, true>(g + r * stride, n, group);
    for (int64_t i = 0; i < n; ++i) cols[i] += group[i];
  }
}

// m = codebook[codes] * scale
static inline void decode(const uint8_t* codes, float scale, const Codec& codec, int n, float* m) {
  for (int i = 0; i < n; ++i) m[i] = codec.level[codes[i]] * scale;
}

// codes of m / scale: rounded to the grid by the low half of the dither, to a level by its high half. `turn` is the dither at
// the first element.
static inline void encode(const float* m, float scale, const Codec& codec, int n, uint32_t turn, uint8_t* codes) {
  constexpr int CHUNK = 256;
  uint32_t points[CHUNK];  // grid point above -GRID, and the high half of the dither
  const float divisor = scale > 0 ? scale : 1.0f;  // all moments of a block are 0 where its scale is
  for (int start = 0; start < n; start += CHUNK, m += CHUNK, codes += CHUNK, turn += CHUNK * DITHER_INDEX) {
    const int count = n - start < CHUNK ? n - start : CHUNK;
    for (int i = 0; i < count; ++i) {  // in vector registers
      const float x = m[i] / divisor * FIXED;
      const int32_t whole = static_cast<int32_t>(x);
      const uint32_t dither = turn + static_cast<uint32_t>(i) * DITHER_INDEX;
      const int32_t floor = whole - (x < static_cast<float>(whole));
      const int32_t point = ((floor + static_cast<int32_t>(dither & 0xFFFF)) >> FRACTION_BITS) + GRID;
      points[i] = static_cast<uint32_t>(point) | (dither & 0xFFFF0000u);
    }
    for (int i = 0; i < count; ++i) {  // one by one: gathers are no faster
      const uint32_t point = points[i] & 0xFFFF, share = points[i] >> 16, code = codec.below[point];
      const uint32_t rung = codec.rung[code];
      codes[i] = static_cast<uint8_t>(code + (point - (rung & 0xFFFF) > (rung >> 16) * share >> 16));
    }
  }
}

// m = map[codes] * scale
static inline void decode(const uint8_t* codes, float scale, const Map& map, int n, float* m) {
  for (int i = 0; i < n; ++i) m[i] = map.level[codes[i]] * scale;
}

// Codes of the levels nearest to m / scale.
static inline void encode(const float* m, float scale, const Map& map, int n, uint8_t* codes) {
  const float divisor = scale > 0 ? scale : 1.0f, least = map.is_unsigned ? map.threshold[0] : -1.0f;
  for (int i = 0; i < n; ++i) {
    const float ratio = m[i] / divisor;
    const float x = map.is_unsigned && m[i] > 0 && ratio < least ? least : ratio;
    const int count = map.below[bits_of(x) >> 16];
    codes[i] = static_cast<uint8_t>(count + (x >= map.threshold[count]));
  }
}

// The largest magnitude among n values.
static inline float largest(const float* m, int n) {
  uint32_t found = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(m[i]) & 0x7FFFFFFFu;
    found = magnitude > found ? magnitude : found;
  }
  return float_of(found);
}

// The smallest bf16 that is not below x.
static inline uint16_t round_up(float x) { return static_cast<uint16_t>((bits_of(x) + 0xFFFF) >> 16); }

// n numbers as fp32: the numbers themselves, or a copy in `buffer`.
static inline float* widen(float* x, int, float*, Float32) { return x; }
template <class T>
static inline float* widen(const uint16_t* __restrict x, int n, float* __restrict buffer, T) {
  for (int i = 0; i < n; ++i) buffer[i] = T::get(x[i]);
  return buffer;
}

// Stores n fp32 numbers back.
static inline void narrow(const float*, int, float*, Float32) {}
template <class T>
static inline void narrow(const float* __restrict x, int n, uint16_t* __restrict target, T) {
  for (int i = 0; i < n; ++i) target[i] = T::put(x[i]);
}

// Whether the instruction set has loops of its own for AdamW with learned codes, and has stepped the tile with them.
template <class P, class G>
static bool apply_coded_adamw(const Tile&, const Step&) {
  return false;
}

}  // namespace generic
