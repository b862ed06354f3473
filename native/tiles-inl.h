// Both passes over a tile, for every storage type. Included once per instruction set, after its loops.

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

// Sum of squares of the gradients with coupled weight decay, as the rule sees them.
template <class P, class G>
static double observe_coupled_typed(const Tile& t, float sign, float coupled) {
  constexpr int MANY = 1024;
  float sum[MANY];
  const auto* p = static_cast<const typename P::Raw*>(t.param->param) + t.first();
  const auto* g = static_cast<const typename G::Raw*>(t.param->grad) + t.first();
  double total = 0;
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); c += MANY) {
      const int n = static_cast<int>(t.cols() - c < MANY ? t.cols() - c : MANY);
      const int64_t at = r * t.param->cols + c;
      for (int i = 0; i < n; ++i) sum[i] = sign * G::get(g[at + i]) + coupled * P::get(p[at + i]);
      total += observe_row<Float32, false>(sum, n, nullptr);
    }
  }
  return total;
}

template <class P, class G>
static void apply_typed(const Tile& t, const Step& s) {
  if (apply_coded_adamw<P, G>(t, s)) return;
  Runs<P, G> runs(t, s);
  runs.each([&](const Run& run) {
    step_elements(run, s);
    runs.store(run);
  });
  runs.finish();
}

template <class P, class G>
static void measure_typed(const Tile& t, const Step& s, double* squares) {
  Runs<P, G> runs(t, s);
  runs.each([&](const Run& run) { measure_elements(run, s, squares); });
}

// Calls `function` with the storage type.
template <class Function>
static auto with_type(int64_t type, const Function& function) {
  switch (type) {
    case DAYPACK_FP32: return function(Float32{});
    case DAYPACK_BF16: return function(BFloat16{});
    default: return function(Float16{});
  }
}

// Calls `function` with those of parameter and gradient.
template <class Function>
static auto with_types(const DaypackParam& d, const Function& function) {
  return with_type(d.param_type, [&](auto p) { return with_type(d.grad_type, [&](auto g) { return function(p, g); }); });
}

static void observe(const Tile& t, float* rows, float* cols) {
  with_type(t.param->grad_type, [&](auto g) { observe_typed<decltype(g)>(t, rows, cols); });
}

static double observe_blocks(const Tile& t, float* sums) {
  return with_type(t.param->grad_type, [&](auto g) { return observe_blocks_typed<decltype(g)>(t, sums); });
}

static double observe_coupled(const Tile& t, float sign, float coupled) {
  return with_types(*t.param, [&](auto p, auto g) {
    return observe_coupled_typed<decltype(p), decltype(g)>(t, sign, coupled);
  });
}

static void apply(const Tile& t, const Step& s) {
  with_types(*t.param, [&](auto p, auto g) { apply_typed<decltype(p), decltype(g)>(t, s); });
}

static void measure(const Tile& t, const Step& s, double* squares) {
  with_types(*t.param, [&](auto p, auto g) { measure_typed<decltype(p), decltype(g)>(t, s, squares); });
}
