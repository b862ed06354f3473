// One block of a matrix product in fp32, computed as libraries for it do: pieces of both factors are copied, widened, to
// where the second-level cache holds them, and a strip of rows by a panel of columns is added up in registers. Sums run
// over the depth in order, so a block depends on nothing but its place. Included once per instruction set, after
// tiles-inl.h.

#if defined(__AVX512F__)
constexpr int LANES_OF_VECTOR = 16, STRIP = 12;
#elif defined(__AVX2__)
constexpr int LANES_OF_VECTOR = 8, STRIP = 6;
#else
constexpr int LANES_OF_VECTOR = 4, STRIP = 4;
#endif
constexpr int PANEL = 2 * LANES_OF_VECTOR;
constexpr int DEPTH = PRODUCT_DEPTH, ROW = PRODUCT_DEPTH + PRODUCT_PAD;  // a copied row is padded: powers of two share cache sets
static_assert(PRODUCT_ROWS % STRIP == 0 && PRODUCT_COLS % PANEL == 0, "blocks are cut into whole strips and panels");

typedef float Vector __attribute__((vector_size(4 * LANES_OF_VECTOR)));

static inline void copy_wide(const float* x, int n, float* to, Float32) {
  int i = 0;
  for (; i + LANES_OF_VECTOR <= n; i += LANES_OF_VECTOR) __builtin_memcpy(to + i, x + i, sizeof(Vector));
  for (; i < n; ++i) to[i] = x[i];
}
template <class T>
static inline void copy_wide(const uint16_t* x, int n, float* to, T) {
  widen(x, n, to, T{});
}

// sums[STRIP][PANEL] (+)= rows[STRIP][depth] * panel[depth][PANEL]
static __attribute__((noinline)) void add_strip(const float* rows, const float* panel, int depth, float* sums, bool first) {
  Vector sum[STRIP][2];
#pragma GCC unroll 16
  for (int i = 0; i < STRIP; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      Vector old = {};
      if (!first) __builtin_memcpy(&old, sums + i * PRODUCT_COLS + j * LANES_OF_VECTOR, sizeof old);
      sum[i][j] = old;
    }
  for (int k = 0; k < depth; ++k) {
    Vector left, right;
    __builtin_memcpy(&left, panel + k * PANEL, sizeof left);
    __builtin_memcpy(&right, panel + k * PANEL + LANES_OF_VECTOR, sizeof right);
#pragma GCC unroll 16
    for (int i = 0; i < STRIP; ++i) {
      const float x = rows[i * ROW + k];
      sum[i][0] += x * left;
      sum[i][1] += x * right;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < STRIP; ++i)
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j)
      __builtin_memcpy(sums + i * PRODUCT_COLS + j * LANES_OF_VECTOR, &sum[i][j], sizeof(Vector));
}

// Prefetches a rectangle of a matrix, a few cache lines at a time, while another one is computed. All lines at once would
// stall the processor.
class Ahead {
 public:
  Ahead(const void* at, int64_t type, int64_t cols, int64_t row, int64_t row_end, int64_t col, int64_t col_end)
      : size_(type == DAYPACK_FP32 ? 4 : 2),
        stride_(cols * size_),
        width_((col_end - col) * size_),
        line_(static_cast<const char*>(at) + row * stride_ + col * size_),
        left_(width_ > 0 ? row_end - row : 0) {}

  int64_t lines() const { return left_ * ((width_ + 63) / 64); }

  void ask(int64_t count) {
    for (; count > 0 && left_ > 0; --count) {
      __builtin_prefetch(line_ + done_, 0, 2);
      done_ += 64;
      if (done_ < width_) continue;
      done_ = 0;
      line_ += stride_;
      --left_;
    }
  }

 private:
  int64_t size_, stride_, width_;
  const char* line_;
  int64_t left_, done_ = 0;
};

// What a block reads from far memory next: the following piece of the factor that is measured, or the parameter.
static Ahead ahead_of(const Product& x, int64_t row, int64_t row_end, int64_t col, int64_t col_end, int64_t next) {
  const int64_t end = next + DEPTH < x.a.cols ? next + DEPTH : x.a.cols;
  if (x.measured == LEFT) return {x.a.at, x.a.type, x.a.cols, row, row_end, next, end};
  if (x.measured == RIGHT) return {x.b.at, x.b.type, x.b.cols, next, end, col, col_end};
  return {x.param, x.type, x.b.cols, row, row_end, col, next == x.a.cols ? col_end : col};
}

// Sum of the squares of copied rows.
static double squares_of(const float* x, int count, int length, int stride) {
  double total = 0;
  for (int i = 0; i < count; ++i) total += observe_row<Float32, false>(x + i * stride, length, nullptr);
  return total;
}

// Rows [row, row + count) of `a`, columns [from, from + depth).
static void copy_rows(const Matrix& a, int64_t row, int count, int64_t from, int depth, float* to) {
  with_type(a.type, [&](auto type) {
    using Raw = typename decltype(type)::Raw;
    for (int i = 0; i < count; ++i)
      copy_wide(static_cast<const Raw*>(a.at) + (row + i) * a.cols + from, depth, to + i * ROW, type);
  });
}

// Rows [from, from + depth) of `b`, columns [col, col + count), panel after panel, the last one filled up with zeros.
static void copy_panels(const Matrix& b, int64_t from, int depth, int64_t col, int count, float* to) {
  with_type(b.type, [&](auto type) {
    using Raw = typename decltype(type)::Raw;
    for (int k = 0; k < depth; ++k) {
      const Raw* line = static_cast<const Raw*>(b.at) + (from + k) * b.cols + col;
      for (int c = 0; c < count; c += PANEL) {
        const int n = count - c < PANEL ? count - c : PANEL;
        float* here = to + c * DEPTH + k * PANEL;
        copy_wide(line + c, n, here, type);
        for (int i = n; i < PANEL; ++i) here[i] = 0;
      }
    }
  });
}

static double multiply(const Product& x, int64_t row, int64_t row_end, int64_t col, int64_t col_end, float* scratch) {
  float *rows = scratch, *panels = rows + PRODUCT_ROWS * ROW, *sums = panels + DEPTH * PRODUCT_COLS;
  const int height = static_cast<int>(row_end - row), width = static_cast<int>(col_end - col);
  for (int i = height; i < (height + STRIP - 1) / STRIP * STRIP; ++i)
    for (int k = 0; k < DEPTH; ++k) rows[i * ROW + k] = 0;
  double squares = 0;
  for (int64_t from = 0; from < x.a.cols; from += DEPTH) {
    const int depth = static_cast<int>(x.a.cols - from < DEPTH ? x.a.cols - from : DEPTH);
    copy_rows(x.a, row, height, from, depth, rows);
    copy_panels(x.b, from, depth, col, width, panels);
    if (x.measured == LEFT && col == 0) squares += squares_of(rows, height, depth, ROW);
    if (x.measured == RIGHT && row == 0) squares += squares_of(panels, (width + PANEL - 1) / PANEL, depth * PANEL, DEPTH * PANEL);
    Ahead ahead = ahead_of(x, row, row_end, col, col_end, from + depth);
    const int64_t strips = (height + STRIP - 1) / STRIP * ((width + PANEL - 1) / PANEL);
    const int64_t each = (ahead.lines() + strips - 1) / strips;
    for (int c = 0; c < width; c += PANEL) {
      for (int i = 0; i < height; i += STRIP) {
        add_strip(rows + i * ROW, panels + c * DEPTH, depth, sums + i * PRODUCT_COLS + c, from == 0);
        ahead.ask(each);
      }
    }
  }
  if (x.sums != nullptr) {
    for (int i = 0; i < height; ++i)
      __builtin_memcpy(x.sums + (row + i) * x.b.cols + col, sums + i * PRODUCT_COLS, static_cast<size_t>(width) * sizeof(float));
    return squares;
  }
  with_type(x.type, [&](auto type) {
    using P = decltype(type);
    alignas(64) float buffer[PRODUCT_COLS + 16];
    for (int i = 0; i < height; ++i) {
      auto* param = static_cast<typename P::Raw*>(x.param) + (row + i) * x.b.cols + col;
      float* wide = widen(param, width, buffer, P{});
      for (int c = 0; c < width; ++c) wide[c] = x.kept * wide[c] + x.scale * sums[i * PRODUCT_COLS + c];
      narrow(wide, width, param, P{});
    }
  });
  return squares;
}
