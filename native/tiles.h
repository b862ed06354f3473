// Both passes over a tile, for every storage type. Included once per instruction set, after its loops (see generic.h).

template <class G>
static void observe_typed(const Tile& t, float* rows, float* cols) {
  const auto* g = static_cast<const typename G::Raw*>(t.param->grad) + t.first();
  if (cols != nullptr) {
    observe_rows<G>(g, t.param->cols, t.rows(), t.cols(), rows, cols);
  } else {
    for (int64_t r = 0; r < t.rows(); ++r) {
      // Short runs added in double: a vector may be one row of any length.
      double total = 0;
      for (int64_t c = 0; c < t.cols(); c += TILE_COLS) {
        const int64_t n = t.cols() - c < TILE_COLS ? t.cols() - c : TILE_COLS;
        total += observe_row<G, false>(g + r * t.param->cols + c, n, nullptr);
      }
      rows[r] = static_cast<float>(total);
    }
  }
}

template <class G>
static double observe_blocks_typed(const Tile& t, float* sums) {
  const auto* g = static_cast<const typename G::Raw*>(t.param->grad) + t.first();
  const int64_t size = t.param->v_block_size;
  double total = 0;
  for (int64_t r = 0; r < t.rows(); ++r) {
    float* out = sums + (t.first_row() + r) * t.v_blocks() + t.col / size;
    for (int64_t c = 0; c < t.cols(); c += size) {
      const int64_t n = t.cols() - c < size ? t.cols() - c : size;
      *out = observe_row<G, false>(g + r * t.param->cols + c, n, nullptr);
      total += *out++;
    }
  }
  return total;
}

// Square roots of what the second moment of a column is relative to its row's.
static void column_roots(const Tile& t, const Step& s, float* root) {
  const float* col = t.param->col + t.matrix * t.param->cols + t.col;
  const float mean = s.mean;
  for (int64_t i = 0; i < t.cols(); ++i) root[i] = mean > 0 ? __builtin_sqrtf(col[i] / mean) : 0.0f;
}

// Square roots of the block means of one row, repeated for every column.
static void block_roots(const Tile& t, int64_t row, const Step& s, float* root) {
  const int64_t size = t.param->v_block_size;
  const float* mean = t.param->block + (t.matrix * t.param->rows + row) * t.v_blocks();
  for (int64_t c = t.col; c < t.col_end;) {
    const int64_t index = c / size;
    const int64_t end = (index + 1) * size < t.col_end ? (index + 1) * size : t.col_end;
    const float value = __builtin_sqrtf(mean[index] / s.correction2);
    for (; c < end; ++c) root[c - t.col] = value;
  }
}

// A block whose moment is computed and not encoded yet. It waits until the next block's moment is, because its scale is the
// end of a chain of dependent instructions.
struct Pending {
  const float* m;
  uint8_t* codes;
  float scale;
  int n;
  uint32_t turn;

  void finish(const Step& s) const {
    if (n > 0) encode(m, scale, *s.codec, n, turn, codes);
  }
};

// New second moments of one row and their square roots, where they are dense beside a coded first moment.
template <class G>
static void dense_roots(const Tile& t, int64_t row, const Step& s, float* root) {
  const int64_t at = (t.matrix * t.param->rows + row) * t.param->cols + t.col;
  const auto* g = static_cast<const typename G::Raw*>(t.param->grad) + at;
  float* v = t.param->exp_avg_sq + at;
  const float beta2 = s.beta2, weight2 = s.weight2, correction2 = s.correction2;
  for (int64_t i = 0; i < t.cols(); ++i) {
    const float x = G::get(g[i]);
    v[i] = beta2 * v[i] + weight2 * x * x;
    root[i] = __builtin_sqrtf(v[i] / correction2);
  }
}

// Whether a tile's rows are short blocks with one second moment per column, and lie one after the other.
static bool has_short_rows(const Tile& t, const Step& s) {
  return s.codec != nullptr && t.param->v_kind == DAYPACK_FACTORED && t.param->cols <= 64 &&
         t.param->block_size >= t.param->cols;
}

template <class P, class G>
static void apply_short_rows(const Tile& t, const Step& s) {
  constexpr int64_t MANY = 256;
  alignas(64) float root[64 + 64];
  float factors[MANY];
  column_roots(t, s, root);
  const DaypackParam& d = *t.param;
  for (int64_t row = t.first_row(), end = row + t.rows(); row < end; row += MANY) {
    const int64_t count = end - row < MANY ? end - row : MANY, at = row * d.cols;
    for (int64_t r = 0; r < count; ++r) factors[r] = __builtin_sqrtf(d.row[row + r] / s.correction2);
    step_short_rows<P, G>(static_cast<typename P::Raw*>(d.param) + at, static_cast<const typename G::Raw*>(d.grad) + at,
                          d.codes + at, d.scale + row, root, factors, count, static_cast<int>(d.cols),
                          s.turn + static_cast<uint32_t>(at) * DITHER_INDEX, s);
  }
}

template <class P, class G>
static void apply_typed(const Tile& t, const Step& s) {
  if (has_short_rows(t, s)) return apply_short_rows<P, G>(t, s);
  const DaypackParam& d = *t.param;
  auto* p = static_cast<typename P::Raw*>(d.param);
  const auto* g = static_cast<const typename G::Raw*>(d.grad);
  if (s.codec == nullptr && d.v_kind == DAYPACK_DENSE) {
    for (int64_t r = 0; r < t.rows(); ++r) {
      const int64_t at = t.first() + r * d.cols;
      step_dense<P, G>(p + at, g + at, d.exp_avg + at, d.exp_avg_sq + at, t.cols(), s);
    }
    return;
  }
  alignas(64) float root[TILE_COLS + 64];
  alignas(64) float moments[2][DAYPACK_LARGEST_BLOCK + 64];
  Pending pending{};
  Row numbers(s);
  if (d.v_kind == DAYPACK_FACTORED) column_roots(t, s, root);
  const int64_t block = s.codec != nullptr ? d.block_size : TILE_COLS;
  const int64_t scales = (d.cols + d.block_size - 1) / d.block_size;
  for (int64_t row = t.row; row < t.row_end; ++row) {
    const int64_t line = t.matrix * d.rows + row;
    float factor = 1.0f;
    if (d.v_kind == DAYPACK_FACTORED) factor = __builtin_sqrtf(d.row[line] / s.correction2);
    else if (d.v_kind == DAYPACK_BLOCKS) block_roots(t, row, s, root);
    else dense_roots<G>(t, row, s, root);
    for (int64_t c = t.col; c < t.col_end; c += block) {
      const int n = static_cast<int>(t.col_end - c < block ? t.col_end - c : block);
      const int64_t at = line * d.cols + c;
      const float* roots = root + (c - t.col);
      if (s.codec != nullptr) {
        const uint32_t turn = s.turn + static_cast<uint32_t>(at) * DITHER_INDEX;
        uint16_t* scale = d.scale + line * scales + c / block;
        float* m = moments[pending.m == moments[0]];
        const float fresh = fresh_coded_block<P, G>(p + at, g + at, d.codes + at, scale, roots, factor, n, s, numbers, m);
        pending.finish(s);
        pending = {m, d.codes + at, fresh, n, turn};
      } else {
        step_block<P, G>(p + at, g + at, d.exp_avg + at, roots, factor, n, s);
      }
    }
  }
  pending.finish(s);
}

// The function made for a storage type (or two).
static void observe(const Tile& t, float* rows, float* cols) {
  switch (t.param->grad_type) {
    case DAYPACK_FP32: return observe_typed<Float32>(t, rows, cols);
    case DAYPACK_BF16: return observe_typed<BFloat16>(t, rows, cols);
    default: return observe_typed<Float16>(t, rows, cols);
  }
}

static double observe_blocks(const Tile& t, float* sums) {
  switch (t.param->grad_type) {
    case DAYPACK_FP32: return observe_blocks_typed<Float32>(t, sums);
    case DAYPACK_BF16: return observe_blocks_typed<BFloat16>(t, sums);
    default: return observe_blocks_typed<Float16>(t, sums);
  }
}

template <class P>
static void apply_to(const Tile& t, const Step& s) {
  switch (t.param->grad_type) {
    case DAYPACK_FP32: return apply_typed<P, Float32>(t, s);
    case DAYPACK_BF16: return apply_typed<P, BFloat16>(t, s);
    default: return apply_typed<P, Float16>(t, s);
  }
}

static void apply(const Tile& t, const Step& s) {
  switch (t.param->param_type) {
    case DAYPACK_FP32: return apply_to<Float32>(t, s);
    case DAYPACK_BF16: return apply_to<BFloat16>(t, s);
    default: return apply_to<Float16>(t, s);
  }
}
