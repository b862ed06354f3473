// Update rules on fp32 numbers, as in src/daypack/rules/, and the loops that apply them to a run of elements.
// Included once per instruction set, inside a namespace of its own, before its codecs.

// Consecutive elements of one row. What is stored otherwise has been widened or decoded into a buffer.
struct Run {
  const float* g;
  float *p, *m, *v;   // m, v: null where the rule keeps none
  const float* root;  // SHARED: square roots of second moments, up to `factor`
  float factor;
  int n;
};

// Where the square root of the second moment comes from: nowhere, the element's own one, or statistics.
enum Second { NONE, OWN, SHARED };

// A rule turns what it sees of an element into a direction, and the old first moment `m` into the new one.
struct AdamW {
  static constexpr bool KEEPS = true;
  static inline float direction(const Step& s, float, float g, float root, float& m) {
    m = s.beta1 * m + s.fresh1 * g;
    return m / (root + s.eps);  // the bias correction is in the rate
  }
};

struct Momentum {
  static constexpr bool KEEPS = true;
  static inline float direction(const Step& s, float, float g, float, float& m) {
    m = s.beta1 * m + s.fresh1 * g;
    return s.ahead * m + s.now * g;
  }
};

struct Lion {
  static constexpr bool KEEPS = true;
  static inline float direction(const Step& s, float, float g, float, float& m) {
    const float look = s.ahead * m + s.now * g;
    m = s.beta1 * m + s.fresh1 * g;
    return static_cast<float>(look > 0) - static_cast<float>(look < 0);
  }
};

struct Lamb {
  static constexpr bool KEEPS = true;
  static inline float direction(const Step& s, float p, float g, float root, float& m) {
    m = s.beta1 * m + s.fresh1 * g;
    return s.unbias * m / (root + s.eps) + s.inner * p;  // the trust ratio is in the rate
  }
  static inline float measured(const Step& s, float p, float g, float root, float m) {
    return direction(s, p, g, root, m);
  }
};

template <bool AVERAGED>
struct Adafactor {
  static constexpr bool KEEPS = AVERAGED;
  static inline float measured(const Step& s, float, float g, float root, float) {
    return g / (root > s.eps ? root : s.eps);
  }
  static inline float direction(const Step& s, float p, float g, float root, float& m) {
    const float clipped = measured(s, p, g, root, m) * s.clip;
    if (!AVERAGED) return clipped;
    m = s.beta1 * m + s.fresh1 * clipped;
    return m;
  }
};

// COUPLED: weight decay is part of the gradient. Where it is 0 the parameter must not enter: it may be infinite.
template <class Rule, Second V, bool COUPLED = false>
static __attribute__((noinline)) void step_run(const Run& run, const Step& step) {
  const Step s = step;
  const float* __restrict g = run.g;
  float *__restrict p = run.p, *__restrict m = run.m, *__restrict v = run.v;
  const float* __restrict root = run.root;
  const float factor = run.factor, unbias2 = 1 / s.correction2;
  for (int i = 0; i < run.n; ++i) {
    const float grad = COUPLED ? s.sign * g[i] + s.coupled * p[i] : s.sign * g[i];
    float rooted = 0, moment = 0;
    if (V == SHARED) rooted = factor * root[i];
    if (V == OWN) {
      const float second = s.beta2 * v[i] + s.fresh2 * (grad * grad);
      v[i] = second;
      rooted = __builtin_sqrtf(second * unbias2);
    }
    if (Rule::KEEPS) moment = m[i];
    const float direction = Rule::direction(s, p[i], grad, rooted, moment);
    if (Rule::KEEPS) m[i] = moment;
    p[i] = s.decay * p[i] - s.rate * direction;
  }
}

// Sum of squares in double, whose range no fp32 number leaves.
static inline double sum_of_squares(const float* __restrict x, int n) {
  constexpr int LANES = 16;
  double lanes[LANES] = {}, sum = 0;
  int i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int k = 0; k < LANES; ++k) lanes[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
  for (int k = 0; i + k < n; ++k) lanes[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
  for (double lane : lanes) sum += lane;
  return sum;
}

// Adds the squares of the parameter and of what the rule measures to `squares`.
template <class Rule, Second V>
static __attribute__((noinline)) void measure_run(const Run& run, const Step& step, double* squares) {
  constexpr int MOST = 256;
  const Step s = step;
  const float factor = run.factor, unbias2 = 1 / s.correction2;
  float measured[MOST];
  for (int at = 0; at < run.n; at += MOST) {
    const int n = run.n - at < MOST ? run.n - at : MOST;
    const float *__restrict g = run.g + at, *__restrict p = run.p + at, *__restrict root = run.root + at;
    const float *__restrict m = Rule::KEEPS ? run.m + at : nullptr, *__restrict v = V == OWN ? run.v + at : nullptr;
    for (int i = 0; i < n; ++i) {
      const float grad = s.sign * g[i];
      const float rooted = V == OWN ? __builtin_sqrtf((s.beta2 * v[i] + s.fresh2 * (grad * grad)) * unbias2)
                                    : factor * root[i];
      measured[i] = Rule::measured(s, p[i], grad, rooted, Rule::KEEPS ? m[i] : 0);
    }
    squares[0] += sum_of_squares(p, n);
    squares[1] += sum_of_squares(measured, n);
  }
}

template <Second V>
static void step_with(const Run& run, const Step& s) {
  const bool coupled = s.coupled != 0;
  switch (s.rule) {
    case DAYPACK_LAMB: return step_run<Lamb, V>(run, s);
    case DAYPACK_ADAFACTOR:
      return run.m != nullptr ? step_run<Adafactor<true>, V>(run, s) : step_run<Adafactor<false>, V>(run, s);
    default: return coupled ? step_run<AdamW, V, true>(run, s) : step_run<AdamW, V>(run, s);
  }
}

template <Second V>
static void measure_with(const Run& run, const Step& s, double* squares) {
  if (s.rule == DAYPACK_LAMB) measure_run<Lamb, V>(run, s, squares);
  else if (run.m != nullptr) measure_run<Adafactor<true>, V>(run, s, squares);
  else measure_run<Adafactor<false>, V>(run, s, squares);
}

// The rule of the step on a run.
static void step_elements(const Run& run, const Step& s) {
  const bool coupled = s.coupled != 0;
  if (s.rule == DAYPACK_LION) step_run<Lion, NONE>(run, s);
  else if (s.rule == DAYPACK_SGD) coupled ? step_run<Momentum, NONE, true>(run, s) : step_run<Momentum, NONE>(run, s);
  else if (run.v != nullptr) step_with<OWN>(run, s);
  else step_with<SHARED>(run, s);
}

static void measure_elements(const Run& run, const Step& s, double* squares) {
  run.v != nullptr ? measure_with<OWN>(run, s, squares) : measure_with<SHARED>(run, s, squares);
}
