// AdamW with learned codes in AVX-512: decoding, rule and scale without leaving the registers. Included inside namespace
// avx512, after runs-inl.h.

// The numbers of a step in the form that the loop wants: the learning rate divides the denominator instead of multiplying
// the direction, which saves an instruction.
struct Row {
  __m512 factor, eps, decay, weight;

  float inverse_rate;

  explicit Row(const Step& s) : inverse_rate(s.rate > 0 ? 1.0f / s.rate : 0.0f) {
    eps = _mm512_set1_ps(s.rate > 0 ? s.eps / s.rate : __builtin_inff());
    decay = _mm512_set1_ps(s.decay);
    weight = _mm512_set1_ps(s.sign * s.fresh1);
  }

  void use(float row_factor) { factor = _mm512_set1_ps(row_factor * inverse_rate); }
};

// Fresh first moment and parameter of the 16 elements in `k`; the old moment is `old` times `unit`. Returns the magnitudes.
template <class P, class G>
static inline __m512 step_vector(typename P::Raw* p, const typename G::Raw* g, __m512i old, __m512 unit, const float* root,
                                 const Row& row, Mask k, float* m, __m512 largest) {
  const __m512 pull = _mm512_mul_ps(load(g, k, G{}), row.weight);
  const __m512 fresh = _mm512_maskz_mov_ps(k, _mm512_fmadd_ps(_mm512_cvtepi32_ps(old), unit, pull));
  _mm512_storeu_ps(m, fresh);
  const __m512 denominator = _mm512_fmadd_ps(row.factor, _mm512_loadu_ps(root), row.eps);
  const __m512 move = _mm512_div_ps(fresh, denominator);
  store(p, k, _mm512_fmsub_ps(load(p, k, P{}), row.decay, move), P{});
  return _mm512_range_ps(largest, fresh, 0xB);  // the larger magnitude
}

// The same for n <= 64 elements. Masks only where they are needed: a masked access to memory that is not in the cache yet
// takes twice as long as the rest of a step.
template <class P, class G, bool FULL>
static inline __m512 step_vectors(typename P::Raw* p, const typename G::Raw* g, const __m512i old[4], __m512 unit,
                                  const float* root, const Row& row, int n, float* m, __m512 largest) {
  for (int q = 0; q < 4; ++q) {
    const int at = 16 * q;
    if (FULL || n >= at + 16)
      largest = step_vector<P, G>(p + at, g + at, old[q], unit, root + at, row, 0xFFFF, m + at, largest);
    else if (n > at)
      largest = step_vector<P, G>(p + at, g + at, old[q], unit, root + at, row, mask_of(n - at), m + at, largest);
  }
  return largest;
}

// n < 64 codes, and zeros after them.
static inline __m512i load_codes(const uint8_t* codes, int n) {
  __m512i all = _mm512_setzero_si512();
  if (n >= 32) all = _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
  const int rest = n % 32;
  if (rest == 0) return all;
  const __m256i last = rest == 16
      ? _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + n - rest)))
      : _mm256_maskz_loadu_epi8((1u << rest) - 1, codes + n - rest);
  return n >= 32 ? _mm512_inserti64x4(all, last, 1) : _mm512_zextsi256_si512(last);
}

// `fresh_coded_block` where the old scale is too small for whole numbers.
template <class P, class G>
static __attribute__((noinline)) float fresh_plain_block(typename P::Raw* p, const typename G::Raw* g,
                                                         const uint8_t* codes, uint16_t* scale, const float* root,
                                                         float factor, int n, const Step& s, float* m) {
  float wide_p[DAYPACK_LARGEST_BLOCK], wide_g[DAYPACK_LARGEST_BLOCK];
  generic::decode(codes, BFloat16::get(*scale), *s.codec, n, m);
  const float* gradient = generic::widen(const_cast<typename G::Raw*>(g), n, wide_g, G{});
  const Run run{gradient, generic::widen(p, n, wide_p, P{}), m, nullptr, root, factor, n};
  step_elements(run, s);
  generic::narrow(run.p, n, p, P{});
  *scale = generic::round_up(generic::largest(m, n));
  return BFloat16::get(*scale);
}

// Fresh moment into `m`, parameter and scale of one block. Returns the scale.
template <class P, class G>
static inline float fresh_coded_block(typename P::Raw* p, const typename G::Raw* g, const uint8_t* codes, uint16_t* scale,
                                      const float* root, float factor, int n, const Step& s, Row& row, float* m) {
  const float old_scale = BFloat16::get(*scale);
  if (old_scale < SMALLEST_SCALE && old_scale > 0) {
    for (int i = n / 64 * 64; i < (n + 63) / 64 * 64; i += 16) _mm512_storeu_ps(m + i, _mm512_setzero_ps());
    return fresh_plain_block<P, G>(p, g, codes, scale, root, factor, n, s, m);
  }
  const Decoder decode(*s.codec);
  const __m512 unit = _mm512_set1_ps(s.beta1 * old_scale / FIXED);
  row.use(factor);
  __m512 largest = _mm512_setzero_ps();
  __m512i old[4];
  int at = 0;
  for (; at + 64 <= n; at += 64) {
    prefetch<64>(p + at + AHEAD);
    prefetch<64>(g + at + AHEAD);
    prefetch<64>(codes + at + AHEAD);
    decode(_mm512_loadu_si512(codes + at), old);
    largest = step_vectors<P, G, true>(p + at, g + at, old, unit, root + at, row, 64, m + at, largest);
  }
  if (at < n) {
    for (int i = n / 16 * 16; i < at + 64; i += 16) _mm512_storeu_ps(m + i, _mm512_setzero_ps());
    decode(load_codes(codes + at, n - at), old);
    largest = step_vectors<P, G, false>(p + at, g + at, old, unit, root + at, row, n - at, m + at, largest);
  }
  *scale = static_cast<uint16_t>((bits_of(_mm512_reduce_max_ps(largest)) + 0xFFFF) >> 16);
  return BFloat16::get(*scale);
}

// Rows of at most 64 elements, each of them one block: moments of many rows are encoded together.
template <class P, class G>
static void step_short_rows(typename P::Raw* p, const typename G::Raw* g, uint8_t* codes, uint16_t* scale,
                            const float* root, const float* factors, int64_t rows, int n, uint32_t turn, const Step& s) {
  alignas(64) float m[RUN + 64], inverse[RUN + 64];
  const int each = RUN / n;
  Row numbers(s);
  for (int64_t first = 0; first < rows; first += each) {
    const int count = static_cast<int>(rows - first < each ? rows - first : each);
    const int64_t start = first * n;
    const uint32_t at = turn + static_cast<uint32_t>(start) * DITHER_INDEX;
    bool ordinary = true;
    float scales[RUN];
    for (int r = 0; r < count; ++r) {
      const int64_t row = start + r * n;
      scales[r] = fresh_coded_block<P, G>(p + row, g + row, codes + row, scale + first + r, root, factors[first + r], n, s,
                                          numbers, m + r * n);
      ordinary = ordinary && scales[r] >= SMALLEST_SCALE;
      const __m512 factor = _mm512_set1_ps(ordinary ? inverse_of(scales[r]) : 0.0f);
      for (int i = 0; i < n; i += 16) _mm512_storeu_ps(inverse + r * n + i, factor);
    }
    if (ordinary) {
      for (int i = count * n; i < RUN; ++i) m[i] = 0;
      encode_run(m, inverse, *s.codec, count * n, at, codes + start);
    } else {
      for (int r = 0; r < count; ++r)
        generic::encode(m + r * n, scales[r], *s.codec, n, at + static_cast<uint32_t>(r * n) * DITHER_INDEX,
                        codes + start + r * n);
    }
  }
}

// All blocks of a tile.
template <class P, class G>
static void apply_blocks(const Tile& t, const Step& s) {
  const DaypackParam& d = *t.param;
  auto* p = static_cast<typename P::Raw*>(d.param);
  const auto* g = static_cast<const typename G::Raw*>(d.grad);
  alignas(64) float moments[2][DAYPACK_LARGEST_BLOCK + 64];
  Roots roots;
  Pending pending;
  Row numbers(s);
  if (d.v_kind != DAYPACK_OWN) roots.start(t, s);
  const int64_t scales = (d.cols + d.block_size - 1) / d.block_size;
  for (int64_t row = t.row; row < t.row_end; ++row) {
    const int64_t line = t.matrix * d.rows + row;
    if (d.v_kind == DAYPACK_OWN) dense_roots<G>(t, row, s, roots.root);
    else roots.next(t, row, s);
    for (int64_t c = t.col; c < t.col_end; c += d.block_size) {
      const int n = static_cast<int>(t.col_end - c < d.block_size ? t.col_end - c : d.block_size);
      const int64_t at = line * d.cols + c;
      const uint32_t turn = s.turn + static_cast<uint32_t>(d.first + at) * DITHER_INDEX;
      uint16_t* scale = static_cast<uint16_t*>(d.scale) + line * scales + c / d.block_size;
      float* m = moments[pending.m == moments[0]];
      const float fresh = fresh_coded_block<P, G>(p + at, g + at, d.codes + at, scale, roots.root + (c - t.col),
                                                  roots.factor, n, s, numbers, m);
      pending.finish();
      pending = {m, d.codes + at, s.codec, nullptr, fresh, n, turn};
    }
  }
  pending.finish();
}

// The same where rows are short blocks with one second moment per column, and lie one after the other.
template <class P, class G>
static void apply_short_rows(const Tile& t, const Step& s) {
  constexpr int64_t MANY = 256;
  float factors[MANY];
  Roots roots;
  roots.start(t, s);
  const DaypackParam& d = *t.param;
  for (int64_t row = t.first_row(), end = row + t.rows(); row < end; row += MANY) {
    const int64_t count = end - row < MANY ? end - row : MANY, at = row * d.cols;
    for (int64_t r = 0; r < count; ++r) factors[r] = __builtin_sqrtf(d.row[row + r] / s.correction2);
    step_short_rows<P, G>(static_cast<typename P::Raw*>(d.param) + at, static_cast<const typename G::Raw*>(d.grad) + at,
                          d.codes + at, static_cast<uint16_t*>(d.scale) + row, roots.root, factors, count,
                          static_cast<int>(d.cols), s.turn + static_cast<uint32_t>(d.first + at) * DITHER_INDEX, s);
  }
}

template <class P, class G>
static bool apply_coded_adamw(const Tile& t, const Step& s) {
  const DaypackParam& d = *t.param;
  if (s.rule != DAYPACK_ADAMW || s.codec == nullptr || d.v_codes != nullptr) return false;
  if (d.v_kind == DAYPACK_FACTORED && d.cols <= 64 && d.block_size >= d.cols) apply_short_rows<P, G>(t, s);
  else apply_blocks<P, G>(t, s);
  return true;
}
