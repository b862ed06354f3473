// The loops of calibration. Included once per instruction set, inside a namespace of its own, after numbers-inl.h.

namespace learn {

constexpr int PIECE = 256, FINEST = 16;

template <class G>
static inline float absmax(const typename G::Raw* g, int64_t n) {
  uint32_t lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (int k = 0; k < 16; ++k) {
      const uint32_t magnitude = bits_of(G::get(g[i + k])) & 0x7FFFFFFFu;
      lanes[k] = magnitude > lanes[k] ? magnitude : lanes[k];
    }
  for (int k = 0; i < n; ++i, ++k) {
    const uint32_t magnitude = bits_of(G::get(g[i])) & 0x7FFFFFFFu;
    lanes[k] = magnitude > lanes[k] ? magnitude : lanes[k];
  }
  uint32_t largest = 0;
  for (const uint32_t lane : lanes) largest = lane > largest ? lane : largest;
  return float_of(largest);
}

// Counts of one block's elements over its absmax. Two tables, because equal bins often follow each other, and one bin past
// the last for the zeros, which do not count.
template <class G>
static inline void count_block(const typename G::Raw* g, int64_t size, uint32_t (*counts)[BINS + 1]) {
  const float scale = absmax<G>(g, size), divisor = scale > 0 ? scale : 1.0f;
  uint16_t bin[PIECE];
  for (int64_t i = 0; i < size; i += PIECE) {
    const int n = static_cast<int>(size - i < PIECE ? size - i : PIECE);
    for (int k = 0; k < n; ++k) {
      const float x = G::get(g[i + k]);
      const int32_t index = static_cast<int32_t>((x / divisor + 1.0f) * (BINS / 2));
      bin[k] = static_cast<uint16_t>(x == 0 ? BINS : index < BINS ? index : BINS - 1);
    }
    int k = 0;
    for (; k + 4 <= n; k += 4) {
      ++counts[0][bin[k]];
      ++counts[1][bin[k + 1]];
      ++counts[0][bin[k + 2]];
      ++counts[1][bin[k + 3]];
    }
    for (; k < n; ++k) ++counts[0][bin[k]];
  }
}

template <class G>
static void count_typed(const void* grad, int64_t cols, int64_t block_size, int64_t first, int64_t last, int64_t* counts) {
  constexpr int64_t MOST = int64_t{1} << 30;  // elements before a 32-bit count could overflow
  static_assert(MOST < (int64_t{1} << 32), "");
  const int64_t blocks = (cols + block_size - 1) / block_size, many = MOST / block_size > 0 ? MOST / block_size : 1;
  for (int64_t start = first; start < last; start += many) {
    uint32_t tables[2][BINS + 1] = {};
    const int64_t stop = start + many < last ? start + many : last;
    int64_t row = start / blocks, col = start % blocks * block_size;
    for (int64_t i = start; i < stop; ++i) {
      const int64_t size = cols - col < block_size ? cols - col : block_size;
      count_block<G>(static_cast<const typename G::Raw*>(grad) + row * cols + col, size, tables);
      col += block_size;
      if (col >= cols) ++row, col = 0;
    }
    for (int i = 0; i < BINS; ++i) counts[i] += static_cast<int64_t>(tables[0][i]) + tables[1][i];
  }
}

// Natural logarithm of positive normal numbers, within 2 units in the last place (the polynomial is Cephes').
static inline float log_of(float x) {
  const uint32_t bits = bits_of(x);
  // Mantissa in [sqrt(1/2), sqrt(2)).
  const int32_t exponent = static_cast<int32_t>(bits - 0x3F3504F3u) >> 23;
  const float m = float_of(bits - (static_cast<uint32_t>(exponent) << 23)) - 1.0f, e = static_cast<float>(exponent);
  float y = 7.0376836292e-2f;
  y = y * m - 1.1514610310e-1f;
  y = y * m + 1.1676998740e-1f;
  y = y * m - 1.2420140846e-1f;
  y = y * m + 1.4249322787e-1f;
  y = y * m - 1.6668057665e-1f;
  y = y * m + 2.0000714765e-1f;
  y = y * m - 2.4999993993e-1f;
  y = y * m + 3.3333331174e-1f;
  const float square = m * m;
  return (m + (y * m * square + e * -2.12194440e-4f - 0.5f * square)) + e * 0.693359375f;
}

// sums[b] = sum of log(g^2 + 1e-12) over the b-th FINEST elements, for 16 of them: halves added to halves.
template <class G>
static inline void log_sums(const typename G::Raw* g, int count, double* sums) {
  float logs[16 * FINEST];
  for (int i = 0; i < count * FINEST; ++i) {
    const float x = G::get(g[i]);
    logs[i] = log_of(x * x + 1e-12f);
  }
  for (int half = FINEST / 2; half > 0; half /= 2)
    for (int b = 0; b < count; ++b)
      for (int i = 0; i < half; ++i) logs[b * half + i] = logs[b * 2 * half + i] + logs[b * 2 * half + half + i];
  for (int b = 0; b < count; ++b) sums[b] = static_cast<double>(logs[b]);
}

// Adds one row's distances between the means of neighbouring blocks, for every block size; `prefix` is scratch.
template <class G>
static void score_row(const typename G::Raw* g, int64_t cols, const int64_t* sizes, int64_t count, double* prefix,
                      double* totals) {
  const int64_t units = cols / FINEST;
  prefix[0] = 0;
  for (int64_t at = 0; at < units; at += 16) {
    const int n = static_cast<int>(units - at < 16 ? units - at : 16);
    double sums[16];
    log_sums<G>(g + at * FINEST, n, sums);
    for (int b = 0; b < n; ++b) prefix[at + b + 1] = prefix[at + b] + sums[b];
  }
  for (int64_t s = 0; s < count; ++s) {
    const int64_t unit = sizes[s] / FINEST, blocks = cols / sizes[s];
    double total = 0, before = prefix[unit];
    for (int64_t b = 1; b < blocks; ++b) {
      const double here = prefix[(b + 1) * unit] - prefix[b * unit], step = here - before;
      total += step < 0 ? -step : step;
      before = here;
    }
    totals[s] += total / static_cast<double>(sizes[s]);
  }
}

template <class G>
static void score_typed(const void* grad, int64_t cols, int64_t row, int64_t row_end, const int64_t* sizes, int64_t count,
                        double* prefix, double* totals) {
  for (; row < row_end; ++row)
    score_row<G>(static_cast<const typename G::Raw*>(grad) + row * cols, cols, sizes, count, prefix, totals);
}

static void count(const void* grad, int64_t type, int64_t cols, int64_t block_size, int64_t first, int64_t last,
                  int64_t* counts) {
  switch (type) {
    case DAYPACK_FP32: return count_typed<Float32>(grad, cols, block_size, first, last, counts);
    case DAYPACK_BF16: return count_typed<BFloat16>(grad, cols, block_size, first, last, counts);
    default: return count_typed<Float16>(grad, cols, block_size, first, last, counts);
  }
}

static void score(const void* grad, int64_t type, int64_t cols, int64_t row, int64_t row_end, const int64_t* sizes,
                  int64_t size_count, double* prefix, double* totals) {
  switch (type) {
    case DAYPACK_FP32: return score_typed<Float32>(grad, cols, row, row_end, sizes, size_count, prefix, totals);
    case DAYPACK_BF16: return score_typed<BFloat16>(grad, cols, row, row_end, sizes, size_count, prefix, totals);
    default: return score_typed<Float16>(grad, cols, row, row_end, sizes, size_count, prefix, totals);
  }
}

// The first of positions low..high with the least best[i] plus squared error of bins i to j around their mean; that error is
// next[j]. No product is added to anything, so that the result does not depend on fused instructions.
static inline int64_t cheapest(const Layer& l, int64_t j, int64_t low, int64_t high) {
  const double w = l.w[j], x = l.x[j], xx = l.xx[j];
#if defined(__AVX512F__)
  // Most runs are short: one vector, and no loop whose length the processor has to guess.
  const __m512d tiny = _mm512_set1_pd(1e-300), zero = _mm512_setzero_pd();
  __m512i place = _mm512_add_epi64(_mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), _mm512_set1_epi64(low)), where = place;
  __m512d lowest = _mm512_set1_pd(__builtin_inf());
  for (int64_t i = low; i <= high; i += 8, place = _mm512_add_epi64(place, _mm512_set1_epi64(8))) {
    const __mmask8 inside = high - i >= 7 ? 0xFF : static_cast<__mmask8>((2 << (high - i)) - 1);
    const __m512d mass = _mm512_sub_pd(_mm512_set1_pd(w), _mm512_maskz_loadu_pd(inside, l.w + i));
    const __m512d first = _mm512_sub_pd(_mm512_set1_pd(x), _mm512_maskz_loadu_pd(inside, l.x + i));
    const __m512d second = _mm512_sub_pd(_mm512_set1_pd(xx), _mm512_maskz_loadu_pd(inside, l.xx + i));
    const __m512d share = _mm512_div_pd(_mm512_mul_pd(first, first), _mm512_max_pd(mass, tiny));
    const __m512d cost = _mm512_max_pd(_mm512_sub_pd(second, share), zero);
    const __m512d value = _mm512_add_pd(_mm512_maskz_loadu_pd(inside, l.best + i), cost);
    const __mmask8 less = _mm512_mask_cmp_pd_mask(inside, value, lowest, _CMP_LT_OQ);
    lowest = _mm512_mask_mov_pd(lowest, less, value);
    where = _mm512_mask_mov_epi64(where, less, place);
  }
  l.next[j] = _mm512_reduce_min_pd(lowest);
  return _mm512_mask_reduce_min_epi64(_mm512_cmp_pd_mask(lowest, _mm512_set1_pd(l.next[j]), _CMP_EQ_OQ), where);
#else
  const int64_t count = high - low + 1;
  for (int64_t i = 0; i < count; ++i) {  // vectorised: the divisions are what takes time
    const double mass = w - l.w[low + i], first = x - l.x[low + i];
    const double cost = (xx - l.xx[low + i]) - first * first / (mass > 1e-300 ? mass : 1e-300);
    l.scratch[i] = l.best[low + i] + (cost > 0 ? cost : 0);
  }
  int64_t least = 0;
  for (int64_t i = 1; i < count; ++i) least = l.scratch[i] < l.scratch[least] ? i : least;
  l.next[j] = l.scratch[least];
  return low + least;
#endif
}

// next[j] = min over i <= j of best[i] + cost(i, j). The best i, start[j], rises with j: both neighbours bound it.
static void fill_layer(const Layer& l) {
  l.next[0] = 0;
  l.start[0] = 0;
  l.start[l.bins] = cheapest(l, l.bins, 0, l.bins);
  int64_t step = 1;
  while (2 * step < l.bins) step *= 2;
  for (; step > 0; step /= 2) {
    for (int64_t j = step; j < l.bins; j += 2 * step) {
      const int64_t after = l.start[j + step < l.bins ? j + step : l.bins];
      l.start[j] = cheapest(l, j, l.start[j - step], after < j ? after : j);
    }
  }
}

}  // namespace learn
