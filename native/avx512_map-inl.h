// Fixed maps in AVX-512: any 256 levels, by permutes of bytes. Included inside namespace avx512, after avx512-inl.h, whose
// search tree it uses; generic-inl.h defines what is computed.

// 64 fp32 numbers of a table in four planes of bytes, for indices in the order that `unpacking` gives.
static inline void look_up(const __m512i planes[4], __m512 out[4]) {
  const __m512i low[2] = {_mm512_unpacklo_epi8(planes[0], planes[1]), _mm512_unpackhi_epi8(planes[0], planes[1])};
  const __m512i high[2] = {_mm512_unpacklo_epi8(planes[2], planes[3]), _mm512_unpackhi_epi8(planes[2], planes[3])};
  for (int i = 0; i < 2; ++i) {
    out[2 * i] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low[i], high[i]));
    out[2 * i + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low[i], high[i]));
  }
}

// m = map[codes] * scale; `m` is written up to the next multiple of 64.
static __attribute__((noinline)) void decode(const uint8_t* codes, float scale, const Map& map, int n, float* m) {
  __m512i table[4][4];
  for (int plane = 0; plane < 4; ++plane)
    for (int i = 0; i < 4; ++i) table[plane][i] = _mm512_load_si512(map.level_planes[plane] + 64 * i);
  const __m512i order = unpacking();
  const __m512 factor = _mm512_set1_ps(scale);
  for (int at = 0; at < n; at += 64) {
    const __mmask64 some = n - at >= 64 ? ~0ull : (1ull << (n - at)) - 1;
    const __m512i index = _mm512_permutexvar_epi8(order, _mm512_maskz_loadu_epi8(some, codes + at));
    const __mmask64 upper = _mm512_movepi8_mask(index);
    __m512i planes[4];
    for (int plane = 0; plane < 4; ++plane)
      planes[plane] = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(table[plane][0], index, table[plane][1]),
                                             _mm512_permutex2var_epi8(table[plane][2], index, table[plane][3]));
    __m512 level[4];
    look_up(planes, level);
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(m + at + 16 * i, _mm512_mul_ps(level[i], factor));
  }
}

// m / scale, rounded as a division: the remainder corrects the product with the inverse (Markstein). Exact as long as the
// remainder does not underflow, so that tiny scales take the division.
struct Ratio {
  __m512 scale, inverse, least;
  bool tiny, lifts;

  Ratio(float of, const Map& map) : scale(_mm512_set1_ps(of > 0 ? of : 1.0f)), tiny(of < SMALLEST_SCALE) {
    inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), scale);
    tiny = tiny || of > 0x1p90f;
    lifts = map.is_unsigned;
    least = _mm512_set1_ps(map.threshold[0]);
  }

  inline __m512 operator()(__m512 m) const {
    __m512 x;
    if (__builtin_expect(tiny, 0)) {
      x = _mm512_div_ps(m, scale);
    } else {
      const __m512 near = _mm512_mul_ps(m, inverse);
      x = _mm512_fmadd_ps(_mm512_fnmadd_ps(near, scale, m), inverse, near);
    }
    // What is not 0 must not become 0: at least code 1.
    if (lifts) x = _mm512_mask_max_ps(x, _mm512_cmp_ps_mask(m, _mm512_setzero_ps(), _CMP_GT_OQ), x, least);
    return x;
  }
};

struct MapEncoder {
  const Map& map;
  __m512i order, in_order, upper_halves;

  explicit MapEncoder(const Map& tables) : map(tables), order(unpacking()), in_order(low_bytes()), upper_halves(high_words()) {}

  // Codes of 64 N values.
  template <int N>
  inline void operator()(const float* m, const Ratio& ratio, __m512i codes[N]) const {
    alignas(64) float x[64 * N];
    __m512i key[2 * N], node[2 * N];
    for (int j = 0; j < 2 * N; ++j) {
      const __m512 a = ratio(_mm512_loadu_ps(m + 32 * j)), b = ratio(_mm512_loadu_ps(m + 32 * j + 16));
      _mm512_store_ps(x + 32 * j, a);
      _mm512_store_ps(x + 32 * j + 16, b);
      const __m512i upper = _mm512_permutex2var_epi16(_mm512_castps_si512(a), upper_halves, _mm512_castps_si512(b));
      const __m512i turned = _mm512_srli_epi16(_mm512_srai_epi16(upper, 15), 1);  // see key_of
      key[j] = _mm512_xor_si512(upper, turned);
    }
    search<2 * N>(map.heap, key, node);
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) codes[j] = finish(node + 2 * j, x + 64 * j);
  }

 private:
  // One more where the only threshold that may have the same key is not above the value.
  inline __m512i finish(const __m512i node[2], const float* x) const {
    const __m512i codes = _mm512_permutex2var_epi8(node[0], in_order, node[1]);
    const __m512i index = _mm512_permutexvar_epi8(order, codes);
    const __mmask64 upper = _mm512_movepi8_mask(index);
    __m512i planes[4];
    for (int plane = 0; plane < 4; ++plane) {
      const uint8_t* table = map.threshold_planes[plane];
      planes[plane] = _mm512_mask_blend_epi8(
          upper, _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64)),
          _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), index, _mm512_load_si512(table + 192)));
    }
    __m512 threshold[4];
    look_up(planes, threshold);
    uint64_t more = 0;
    for (int i = 0; i < 4; ++i)
      more |= static_cast<uint64_t>(_mm512_cmp_ps_mask(_mm512_load_ps(x + 16 * i), threshold[i], _CMP_GE_OQ)) << (16 * i);
    return _mm512_mask_add_epi8(codes, more, codes, _mm512_set1_epi8(1));
  }
};

// Codes of the levels nearest to m / scale; `m` is readable up to the next multiple of 64.
static __attribute__((noinline)) void encode(const float* m, float scale, const Map& map, int n, uint8_t* codes) {
  const MapEncoder encoder(map);
  const Ratio ratio(scale, map);
  constexpr int MANY = 64 * SIDE_BY_SIDE;
  int at = 0;
  for (; at + MANY <= n; at += MANY) {
    __m512i found[SIDE_BY_SIDE];
    encoder.template operator()<SIDE_BY_SIDE>(m + at, ratio, found);
    for (int j = 0; j < SIDE_BY_SIDE; ++j) _mm512_storeu_si512(codes + at + 64 * j, found[j]);
  }
  for (; at < n; at += 64) {
    __m512i found[1];
    encoder.template operator()<1>(m + at, ratio, found);
    _mm512_mask_storeu_epi8(codes + at, n - at >= 64 ? ~0ull : (1ull << (n - at)) - 1, found[0]);
  }
}
