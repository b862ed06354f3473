// The same loops in AVX-512 (with BW, VBMI and VBMI2): the codec stays in vector registers, where a table of 256 entries
// would need gathers. Included inside namespace avx512, after generic-inl.h, which defines what is computed here.

using Mask = __mmask16;

static inline Mask mask_of(int n) { return n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<Mask>((1u << n) - 1); }

static inline __m512 load(const float* p, Mask k, Float32) { return _mm512_maskz_loadu_ps(k, p); }
static inline __m512 load(const uint16_t* p, Mask k, BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k, p)), 16));
}
static inline __m512 load(const uint16_t* p, Mask k, Float16) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(k, p));
}
static inline void store(float* p, Mask k, __m512 x, Float32) { _mm512_mask_storeu_ps(p, k, x); }
// To nearest, ties to even; vcvtneps2bf16 would flush denormals to zero. A NaN stays one: it comes from a bf16 number or from
// the processor, so that its low half is zero.
static inline void store(uint16_t* p, Mask k, __m512 x, BFloat16) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
  const __m512i i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i high = _mm512_add_epi32(_mm512_mullo_epi32(i, _mm512_set1_epi32(0x00040004)), _mm512_set1_epi32(0x00030001));
  _mm256_mask_storeu_epi16(p, k, _mm512_castsi512_si256(_mm512_permutexvar_epi16(high, sum)));
}
static inline void store(uint16_t* p, Mask k, __m512 x, Float16) {
  _mm256_mask_storeu_epi16(p, k, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Ask for COUNT elements that are needed soon. The encoding between two blocks is so long that the processor, which looks a
// few hundred instructions ahead, would not ask for the next block in time.
constexpr int AHEAD = 512;
template <int COUNT, class T>
static inline void prefetch(const T* p) {
  for (int i = 0; i < COUNT; i += 64 / static_cast<int>(sizeof(T))) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// ------------------------------------------------------------------ observe

// ROWS rows of n elements at once, so that a column sum is loaded and stored once for all of them.
template <class G, int ROWS>
static inline void observe_group(const typename G::Raw* g, int64_t stride, int64_t n, float* row_sums, float* cols) {
  constexpr int64_t ahead = 2048 / sizeof(typename G::Raw);
  __m512 rows[ROWS];
  for (int r = 0; r < ROWS; ++r) rows[r] = _mm512_setzero_ps();
  const auto add = [&](int64_t i, Mask k) {
    __m512 col = _mm512_load_ps(cols + i);
    const int64_t next = i + ahead < n ? i + ahead : ROWS * stride + (i + ahead - n);
    for (int r = 0; r < ROWS; ++r) {
      _mm_prefetch(reinterpret_cast<const char*>(g + r * stride + next), _MM_HINT_T0);
      const __m512 x = load(g + r * stride + i, k, G{});
      rows[r] = _mm512_fmadd_ps(x, x, rows[r]);
      col = _mm512_fmadd_ps(x, x, col);
    }
    _mm512_store_ps(cols + i, col);
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) add(i, 0xFFFF);
  if (i < n) add(i, mask_of(static_cast<int>(n - i)));
  for (int r = 0; r < ROWS; ++r) row_sums[r] = _mm512_reduce_add_ps(rows[r]);
}

template <class G>
static inline void observe_rows(const typename G::Raw* g, int64_t stride, int64_t rows, int64_t n, float* row_sums,
                                float* cols) {
  constexpr int GROUP = 64;
  alignas(64) float group[SUM_COLS + 16];
  for (int64_t i = 0; i < n; ++i) cols[i] = 0;
  for (int64_t r = 0; r < rows;) {
    for (int64_t i = 0; i < n; i += 16) _mm512_store_ps(group + i, _mm512_setzero_ps());
    const int64_t end = r + GROUP < rows ? r + GROUP : rows;
    for (; r + 4 <= end; r += 4) observe_group<G, 4>(g + r * stride, stride, n, row_sums + r, group);
    for (; r < end; ++r) observe_group<G, 1>(g + r * stride, stride, n, row_sums + r, group);
    for (int64_t i = 0; i < n; ++i) cols[i] += group[i];
  }
}

// Sum of squares of one run of elements.
template <class G, bool COLS>
static inline float observe_row(const typename G::Raw* g, int64_t n, float*) {
  static_assert(!COLS, "column sums are taken by observe_group");
  constexpr int64_t ahead = 2048 / sizeof(typename G::Raw);
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    prefetch<64>(g + i + ahead);
    for (int k = 0; k < 4; ++k) {
      const __m512 x = load(g + i + 16 * k, 0xFFFF, G{});
      sums[k] = _mm512_fmadd_ps(x, x, sums[k]);
    }
  }
  for (; i < n; i += 16) {
    const __m512 x = load(g + i, mask_of(static_cast<int>(n - i < 16 ? n - i : 16)), G{});
    sums[0] = _mm512_fmadd_ps(x, x, sums[0]);
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

// -------------------------------------------------------------------- codec

static inline __m512i counting() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// Order of 64 bytes that unpacking to 16 and then to 32 bits undoes: element 16 a + 4 b + c goes to byte 16 b + 4 a + c.
static inline __m512i unpacking() {
  const __m512i i = _mm512_setr_epi32(0, 16, 32, 48, 4, 20, 36, 52, 8, 24, 40, 56, 12, 28, 44, 60);
  return _mm512_add_epi32(_mm512_mullo_epi32(i, _mm512_set1_epi32(0x01010101)), _mm512_set1_epi32(0x03020100));
}

// Indices of the high halves of 32-bit lanes of two vectors, and of the low bytes of their 16-bit lanes, in order.
static inline __m512i high_words() {
  return _mm512_add_epi32(_mm512_mullo_epi32(counting(), _mm512_set1_epi32(0x00040004)), _mm512_set1_epi32(0x00030001));
}
static inline __m512i low_bytes() {
  return _mm512_add_epi32(_mm512_mullo_epi32(counting(), _mm512_set1_epi32(0x08080808)), _mm512_set1_epi32(0x06040200));
}

// Grid points of 64 codes as four vectors of 16 numbers scaled by 65536. Two planes of bytes need half the permutes that
// 16-bit entries would.
struct Decoder {
  __m512i low[4], high[4], order;

  explicit Decoder(const Codec& codec) {
    for (int i = 0; i < 4; ++i) {
      low[i] = _mm512_load_si512(codec.low + 64 * i);
      high[i] = _mm512_load_si512(codec.high + 64 * i);
    }
    order = unpacking();
  }

  inline void operator()(__m512i codes, __m512i out[4]) const {
    codes = _mm512_permutexvar_epi8(order, codes);
    const __mmask64 upper = _mm512_movepi8_mask(codes);
    const __m512i lo = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(low[0], codes, low[1]),
                                              _mm512_permutex2var_epi8(low[2], codes, low[3]));
    const __m512i hi = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(high[0], codes, high[1]),
                                              _mm512_permutex2var_epi8(high[2], codes, high[3]));
    const __m512i even = _mm512_unpacklo_epi8(lo, hi), odd = _mm512_unpackhi_epi8(lo, hi), zero = _mm512_setzero_si512();
    out[0] = _mm512_unpacklo_epi16(zero, even);
    out[1] = _mm512_unpackhi_epi16(zero, even);
    out[2] = _mm512_unpacklo_epi16(zero, odd);
    out[3] = _mm512_unpackhi_epi16(zero, odd);
  }
};

static inline __m512i threshold(const __m512i heap[8], __m512i node, int depth) {
  if (depth < 5) return _mm512_permutexvar_epi16(node, heap[0]);
  if (depth == 5) return _mm512_permutexvar_epi16(node, heap[1]);
  if (depth == 6) return _mm512_permutex2var_epi16(heap[2], node, heap[3]);
  const __mmask32 right = _mm512_test_epi16_mask(node, _mm512_set1_epi16(64));
  return _mm512_mask_blend_epi16(right, _mm512_permutex2var_epi16(heap[4], node, heap[5]),
                                 _mm512_permutex2var_epi16(heap[6], node, heap[7]));
}

// How many of a tree's 255 numbers are below each x, in the low bytes of `node`: N vectors side by side, because each
// search is one long chain of dependent instructions.
template <int N>
static inline void search(const int16_t* tree, const __m512i x[N], __m512i node[N]) {
  __m512i heap[8];
  for (int i = 0; i < 8; ++i) heap[i] = _mm512_load_si512(tree + 32 * i);
  for (int j = 0; j < N; ++j) node[j] = _mm512_set1_epi16(1);
  // The difference is negative, its top bit set, where x is above the number: the next turn in the tree.
#pragma GCC unroll 8
  for (int depth = 0; depth < 8; ++depth)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j)
      node[j] = _mm512_shldi_epi16(node[j], _mm512_sub_epi16(threshold(heap, node[j], depth), x[j]), 1);
}

// Codes of 64 N values at once: a search in 16-bit lanes for the levels at or below them, then rounding.
struct Encoder {
  const Codec& codec;
  __m512i whole, search_order, bytes;

  explicit Encoder(const Codec& tables) : codec(tables) {
    whole = high_words();
    bytes = low_bytes();  // in order; and as the unpacks in `round` want them:
    search_order = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
  }

  // `m` times `inverse(element)` are 16.16 fixed-point numbers of grid points; `turn` is the dither of the first 16.
  template <int N, class Inverse>
  inline void operator()(const float* m, const Inverse& inverse, __m512i turn, __m512i codes[N]) const {
    __m512i x[2 * N], node[2 * N];
    for (int j = 0; j < 2 * N; ++j)
      x[j] = _mm512_permutex2var_epi16(place(m + 32 * j, inverse(32 * j), later(turn, 2 * j)), whole,
                                       place(m + 32 * j + 16, inverse(32 * j + 16), later(turn, 2 * j + 1)));
    search<2 * N>(codec.heap, x, node);
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) codes[j] = round(x + 2 * j, node + 2 * j, later(turn, 4 * j));
  }

 private:
  // The dither `vectors` times 16 elements further on.
  static inline __m512i later(__m512i turn, int vectors) {
    return _mm512_add_epi32(turn, _mm512_set1_epi32(static_cast<int>(16 * static_cast<uint32_t>(vectors) * DITHER_INDEX)));
  }

  // Grid points of 16 values, in the high halves, rounded by the low half of the dither.
  static inline __m512i place(const float* m, __m512 inverse, __m512i turn) {
    const __m512i fixed = _mm512_cvt_roundps_epi32(_mm512_mul_ps(_mm512_load_ps(m), inverse),
                                                   _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    return _mm512_add_epi32(fixed, _mm512_and_si512(turn, _mm512_set1_epi32(0xFFFF)));
  }

  static inline __m512i lookup(const uint8_t* table, __m512i index, __mmask64 upper) {
    return _mm512_mask_blend_epi8(
        upper, _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64)),
        _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), index, _mm512_load_si512(table + 192)));
  }

  // Codes of 64 values from the levels at or below them: up one where x - level > gap times the dither's high half.
  inline __m512i round(const __m512i x[2], const __m512i level[2], __m512i turn) const {
    const __m512i index = _mm512_permutex2var_epi8(level[0], search_order, level[1]);
    const __mmask64 upper = _mm512_movepi8_mask(index);
    const __m512i low = lookup(codec.low, index, upper), high = lookup(codec.high, index, upper);
    const __m512i gap_low = lookup(codec.gap_low, index, upper), gap_high = lookup(codec.gap_high, index, upper);
    const __m512i below[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
    const __m512i gap[2] = {_mm512_unpacklo_epi8(gap_low, gap_high), _mm512_unpackhi_epi8(gap_low, gap_high)};
    __m512i code[2];
    for (int j = 0; j < 2; ++j) {
      const __m512i dither = _mm512_permutex2var_epi16(later(turn, 2 * j), whole, later(turn, 2 * j + 1));
      const __m512i above = _mm512_sub_epi16(x[j], below[j]), limit = _mm512_mulhi_epu16(gap[j], dither);
      const __mmask32 more = _mm512_cmpgt_epu16_mask(above, limit);
      code[j] = _mm512_mask_add_epi16(level[j], more, level[j], _mm512_set1_epi16(1));
    }
    return _mm512_permutex2var_epi8(code[0], bytes, code[1]);
  }
};

// -------------------------------------------------------------------- apply

// Below this a scale times 2^-30 would lose bits; such blocks take the generic loops.
constexpr float SMALLEST_SCALE = 0x1p-90f;
// Groups of 64 values whose searches are interleaved: as many as the registers hold.
constexpr int SIDE_BY_SIDE = 4;

template <int N, class Inverse>
static inline void encode_group(const Encoder& encoder, const float* m, const Inverse& inverse, __m512i turn,
                                uint8_t* codes, int n) {
  __m512i found[N];
  encoder.template operator()<N>(m, inverse, turn, found);
  for (int j = 0; j < N && n > 64 * j; ++j) {
    if (n >= 64 * (j + 1)) _mm512_storeu_si512(codes + 64 * j, found[j]);
    else _mm512_mask_storeu_epi8(codes + 64 * j, (1ull << (n - 64 * j)) - 1, found[j]);
  }
}

// 2^30 / scale, rounded down, so that no product leaves the range of the grid.
static inline float inverse_of(float scale) {
  return _mm_cvtss_f32(_mm_div_round_ss(_mm_set_ss(FIXED), _mm_set_ss(scale), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC));
}

static inline __m512i turns_from(uint32_t turn) {
  return _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(turn)),
                          _mm512_mullo_epi32(counting(), _mm512_set1_epi32(static_cast<int>(DITHER_INDEX))));
}

// `m` is readable, and holds zeros, up to the next multiple of 64.
static __attribute__((noinline)) void encode(const float* m, float scale, const Codec& codec, int n, uint32_t turn,
                                             uint8_t* codes) {
  if (scale < SMALLEST_SCALE) return generic::encode(m, scale, codec, n, turn, codes);
  const Encoder encoder(codec);
  const __m512 factor = _mm512_set1_ps(inverse_of(scale));
  const auto inverse = [factor](int) { return factor; };
  constexpr int MANY = 64 * SIDE_BY_SIDE;
  int at = 0;
  for (; at + MANY <= n; at += MANY)
    encode_group<SIDE_BY_SIDE>(encoder, m + at, inverse, turns_from(turn + static_cast<uint32_t>(at) * DITHER_INDEX),
                               codes + at, MANY);
  for (; at < n; at += 64)
    encode_group<1>(encoder, m + at, inverse, turns_from(turn + static_cast<uint32_t>(at) * DITHER_INDEX), codes + at,
                    n - at);
}

// Several whole rows of up to 64 elements, one after the other: as many as fill the searches that run side by side. `m` and
// `inverse` hold n elements, then zeros up to RUN.
constexpr int RUN = 64 * SIDE_BY_SIDE;
static __attribute__((noinline)) void encode_run(const float* m, const float* inverse, const Codec& codec, int n,
                                                 uint32_t turn, uint8_t* codes) {
  const Encoder encoder(codec);
  const auto factor = [inverse](int at) { return _mm512_load_ps(inverse + at); };
  encode_group<SIDE_BY_SIDE>(encoder, m, factor, turns_from(turn), codes, n);
}

static inline float largest(const float* m, int n) {
  __m512 found = _mm512_setzero_ps();
  int i = 0;
  for (; i + 16 <= n; i += 16) found = _mm512_range_ps(found, _mm512_loadu_ps(m + i), 0xB);  // the larger magnitude
  if (i < n) found = _mm512_range_ps(found, _mm512_maskz_loadu_ps(mask_of(n - i), m + i), 0xB);
  return _mm512_reduce_max_ps(found);
}

static inline float* widen(float* x, int, float*, Float32) { return x; }
template <class T>
static inline float* widen(const uint16_t* x, int n, float* buffer, T) {
  for (int i = 0; i < n; i += 16) _mm512_storeu_ps(buffer + i, load(x + i, mask_of(n - i), T{}));
  return buffer;
}

static inline void narrow(const float*, int, float*, Float32) {}
template <class T>
static inline void narrow(const float* x, int n, uint16_t* target, T) {
  for (int i = 0; i < n; i += 16) {
    const Mask k = mask_of(n - i);
    store(target + i, k, _mm512_maskz_loadu_ps(k, x + i), T{});
  }
}

// m = codebook[codes] * scale; `m` is written up to the next multiple of 64.
static inline void decode(const uint8_t* codes, float scale, const Codec& codec, int n, float* m) {
  if (scale < SMALLEST_SCALE) return generic::decode(codes, scale, codec, n, m);
  const Decoder decoder(codec);
  const __m512 unit = _mm512_set1_ps(scale / FIXED);
  for (int at = 0; at < n; at += 64) {
    __m512i points[4];
    decoder(_mm512_maskz_loadu_epi8(n - at >= 64 ? ~0ull : (1ull << (n - at)) - 1, codes + at), points);
    for (int q = 0; q < 4; ++q)
      _mm512_storeu_ps(m + at + 16 * q, _mm512_mul_ps(_mm512_cvtepi32_ps(points[q]), unit));
  }
}
