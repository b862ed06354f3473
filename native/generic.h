// The loops over one block or one row, in plain C++ that compilers vectorise. Included once per instruction set, inside a
// namespace of its own (see numbers.h). Sums go through LANES partial sums, so their order does not depend on the compiler.

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

// The smallest bf16 that is not below the largest magnitude among n values.
static inline uint16_t block_scale(const float* m, int n) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) {
    const uint32_t magnitude = bits_of(m[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return static_cast<uint16_t>((largest + 0xFFFF) >> 16);
}

// Fresh first moment and parameter of one block: `m` holds the old moment and receives the new one.
template <class P, class G>
static inline void step_block(typename P::Raw* __restrict p, const typename G::Raw* __restrict g, float* __restrict m,
                              const float* __restrict root, float factor, int n, const Step& s) {
  const float beta1 = s.beta1, weight = s.weight, decay = s.decay, rate = s.rate, eps = s.eps;
  for (int i = 0; i < n; ++i) {
    const float fresh = beta1 * m[i] + weight * G::get(g[i]);
    m[i] = fresh;
    p[i] = P::put(decay * P::get(p[i]) - rate * fresh / (factor * root[i] + eps));
  }
}

// What a kernel prepares once for all rows of a tile; nothing here.
struct Row {
  explicit Row(const Step&) {}
};

// The same with codes for the old moment; stores and returns the scale of the new one, whose codes are left to `encode`.
template <class P, class G>
static inline float fresh_coded_block(typename P::Raw* p, const typename G::Raw* g, const uint8_t* codes, uint16_t* scale,
                                      const float* root, float factor, int n, const Step& s, Row&, float* m) {
  decode(codes, BFloat16::get(*scale), *s.codec, n, m);
  step_block<P, G>(p, g, m, root, factor, n, s);
  *scale = block_scale(m, n);
  return BFloat16::get(*scale);
}

// Rows of at most 64 elements, each of them one block.
template <class P, class G>
static void step_short_rows(typename P::Raw* p, const typename G::Raw* g, uint8_t* codes, uint16_t* scale,
                            const float* root, const float* factors, int64_t rows, int n, uint32_t turn, const Step& s) {
  float m[64];
  Row row(s);
  for (int64_t r = 0; r < rows; ++r, p += n, g += n, codes += n, ++scale, turn += static_cast<uint32_t>(n) * DITHER_INDEX) {
    const float fresh = fresh_coded_block<P, G>(p, g, codes, scale, root, factors[r], n, s, row, m);
    encode(m, fresh, *s.codec, n, turn, codes);
  }
}

// AdamW as it is, on n elements with dense moments.
template <class P, class G>
static inline void step_dense(typename P::Raw* __restrict p, const typename G::Raw* __restrict g, float* __restrict m,
                              float* __restrict v, int64_t n, const Step& s) {
  const Step c = s;
  for (int64_t i = 0; i < n; ++i) {
    const float x = G::get(g[i]);
    m[i] = c.beta1 * m[i] + c.weight * x;
    v[i] = c.beta2 * v[i] + c.weight2 * x * x;
    p[i] = P::put(c.decay * P::get(p[i]) - c.rate * m[i] / (__builtin_sqrtf(v[i] / c.correction2) + c.eps));
  }
}

}  // namespace generic
