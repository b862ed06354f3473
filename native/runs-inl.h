// What the second pass makes of a tile: second moments are made ready row by row, moments decoded block by
// block, and what is coded encoded again. Included once per instruction set, after its loops.

// Square roots of second moments, as factors of rows and roots of columns.
struct Roots {
  alignas(64) float root[TILE_COLS + 64];
  float factor = 1;

  // What is the same for all rows of a tile.
  void start(const Tile& t, const Step& s) {
    const float* col = t.param->col + t.matrix * t.param->cols + t.col;
    const float mean = t.param->v_kind == DAYPACK_FACTORED ? s.mean : s.correction2;
    if (t.param->v_kind == DAYPACK_FACTORED || t.param->v_kind == DAYPACK_COLS)
      for (int64_t i = 0; i < t.cols(); ++i) root[i] = mean > 0 ? __builtin_sqrtf(col[i] / mean) : 0.0f;
    else if (t.param->v_kind == DAYPACK_ROWS)
      for (int64_t i = 0; i < t.cols(); ++i) root[i] = 1;
  }

  void next(const Tile& t, int64_t row, const Step& s) {
    const int64_t line = t.matrix * t.param->rows + row;
    if (t.param->v_kind == DAYPACK_FACTORED || t.param->v_kind == DAYPACK_ROWS)
      factor = __builtin_sqrtf(t.param->row[line] / s.correction2);
    else if (t.param->v_kind == DAYPACK_BLOCKS)
      repeat_blocks(t, line, s);
  }

 private:
  // Those of the block means of one row, repeated for every column.
  void repeat_blocks(const Tile& t, int64_t line, const Step& s) {
    const int64_t size = t.param->v_block_size;
    const float* mean = t.param->block + line * t.v_blocks();
    for (int64_t c = t.col; c < t.col_end;) {
      const int64_t index = c / size;
      const int64_t end = (index + 1) * size < t.col_end ? (index + 1) * size : t.col_end;
      const float value = __builtin_sqrtf(mean[index] / s.correction2);
      for (; c < end; ++c) root[c - t.col] = value;
    }
  }
};

// New second moments of one row and their square roots, where they are dense beside a coded first moment.
template <class G>
static void dense_roots(const Tile& t, int64_t row, const Step& s, float* root) {
  const int64_t at = (t.matrix * t.param->rows + row) * t.param->cols + t.col;
  const auto* g = static_cast<const typename G::Raw*>(t.param->grad) + at;
  float* v = t.param->exp_avg_sq + at;
  const float beta2 = s.beta2, fresh2 = s.fresh2, correction2 = s.correction2;
  for (int64_t i = 0; i < t.cols(); ++i) {
    const float x = G::get(g[i]);
    v[i] = beta2 * v[i] + fresh2 * x * x;
    root[i] = __builtin_sqrtf(v[i] / correction2);
  }
}

// A block of fresh moments, not encoded yet. It waits until the next block's moments are computed, because its scale is the
// end of a chain of dependent instructions.
struct Pending {
  const float* m = nullptr;
  uint8_t* codes = nullptr;
  const Codec* codec = nullptr;  // or
  const Map* map = nullptr;
  float scale = 0;
  int n = 0;
  uint32_t turn = 0;

  void finish() {
    if (codec != nullptr) encode(m, scale, *codec, n, turn, codes);
    else if (map != nullptr) encode(m, scale, *map, n, codes);
    codec = nullptr;
    map = nullptr;
  }
};

// The elements of a tile as runs, one block of a row after the other.
template <class P, class G>
class Runs {
 public:
  Runs(const Tile& tile, const Step& step) : t_(tile), d_(*tile.param), s_(step) {
    coded_ = d_.codes != nullptr || d_.v_codes != nullptr;
    own_ = d_.v_kind == DAYPACK_OWN;
    blocks_ = (d_.cols + d_.block_size - 1) / d_.block_size;
    if (!own_) roots_.start(t_, s_);
  }

  template <class Function>
  void each(const Function& function) {
    const int64_t step = coded_ ? d_.block_size : MOST;
    for (int64_t row = t_.row; row < t_.row_end; ++row) {
      line_ = t_.matrix * d_.rows + row;
      if (!own_) roots_.next(t_, row, s_);
      for (int64_t c = t_.col; c < t_.col_end; c += step) {
        const int n = static_cast<int>(t_.col_end - c < step ? t_.col_end - c : step);
        block_ = line_ * blocks_ + c / d_.block_size;
        at_ = line_ * d_.cols + c;
        turn_ ^= 1;
        function(load(roots_.root + (c - t_.col), n));
      }
    }
  }

  // Write back what a run holds in buffers.
  void store(const Run& run) {
    narrow(run.p, run.n, params() + at_, P{});
    if (d_.codes != nullptr) store_first(run);
    if (d_.v_codes != nullptr) {
      const float scale = largest(run.v, run.n);
      d_.v_scale[block_] = scale;
      second_.finish();
      second_ = {pad(run.v, run.n), d_.v_codes + at_, nullptr, static_cast<const Map*>(d_.v_map), scale, run.n, 0};
    }
  }

  void finish() {
    first_.finish();
    second_.finish();
  }

 private:
  static constexpr int MOST = 1024;  // elements of a run where no block is longer

  typename P::Raw* params() const { return static_cast<typename P::Raw*>(d_.param); }

  template <class T>
  static void prefetch_next(const T* x, int n) {
    for (int i = 0; i < n; i += 64 / static_cast<int>(sizeof(T))) __builtin_prefetch(x + n + i);
  }

  Run load(const float* root, int n) {
    if (d_.codes != nullptr) prefetch_next(d_.codes + at_, n);
    // Prefetch where the processor would not load the next block in time: two codecs take too long, and values that are
    // widened first are waited for with no arithmetic meanwhile.
    if (d_.v_codes != nullptr) prefetch_next(d_.v_codes + at_, n);
    if (d_.v_codes != nullptr || sizeof(typename G::Raw) < sizeof(float))
      prefetch_next(static_cast<const typename G::Raw*>(d_.grad) + at_, n);
    if (d_.v_codes != nullptr || sizeof(typename P::Raw) < sizeof(float)) prefetch_next(params() + at_, n);
    const auto* g = static_cast<const typename G::Raw*>(d_.grad) + at_;
    Run run{widen(const_cast<typename G::Raw*>(g), n, g_, G{}), widen(params() + at_, n, p_, P{}), nullptr, nullptr,
            root, roots_.factor, n};
    if (d_.exp_avg != nullptr) run.m = d_.exp_avg + at_;
    if (d_.exp_avg_sq != nullptr) run.v = d_.exp_avg_sq + at_;
    if (s_.codec != nullptr) {
      run.m = m_[turn_];
      decode(d_.codes + at_, BFloat16::get(static_cast<uint16_t*>(d_.scale)[block_]), *s_.codec, n, run.m);
    } else if (d_.codes != nullptr) {
      run.m = m_[turn_];
      decode(d_.codes + at_, static_cast<float*>(d_.scale)[block_], *static_cast<const Map*>(d_.map), n, run.m);
    }
    if (d_.v_codes != nullptr) {
      run.v = v_[turn_];
      decode(d_.v_codes + at_, d_.v_scale[block_], *static_cast<const Map*>(d_.v_map), n, run.v);
    }
    return run;
  }

  void store_first(const Run& run) {
    float scale = largest(run.m, run.n);
    if (s_.codec != nullptr) {
      const uint16_t rounded = round_up(scale);
      static_cast<uint16_t*>(d_.scale)[block_] = rounded;
      scale = BFloat16::get(rounded);
    } else {
      static_cast<float*>(d_.scale)[block_] = scale;
    }
    first_.finish();
    const Map* map = s_.codec == nullptr ? static_cast<const Map*>(d_.map) : nullptr;
    const uint32_t turn = s_.turn + static_cast<uint32_t>(d_.first + at_) * DITHER_INDEX;
    first_ = {pad(run.m, run.n), d_.codes + at_, s_.codec, map, scale, run.n, turn};
  }

  // Encoding reads whole vectors.
  static const float* pad(float* x, int n) {
    for (int i = n; i < (n + 63) / 64 * 64; ++i) x[i] = 0;
    return x;
  }

  const Tile& t_;
  const DaypackParam& d_;
  const Step& s_;
  bool coded_, own_;
  int64_t blocks_, line_ = 0, block_ = 0, at_ = 0;
  int turn_ = 0;  // of the two buffers: the block before may still be waiting in the other one
  Pending first_, second_;
  Roots roots_;
  alignas(64) float g_[DAYPACK_LARGEST_BLOCK + 64], p_[DAYPACK_LARGEST_BLOCK + 64];
  alignas(64) float m_[2][DAYPACK_LARGEST_BLOCK + 64], v_[2][DAYPACK_LARGEST_BLOCK + 64];
};
