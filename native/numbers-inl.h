// Storage types of parameters and gradients, read and written as fp32 one at a time. Included once per instruction set,
// inside a namespace of its own: code compiled for one machine must never be linked into another one's path.

struct Float32 {
  using Raw = float;
  static inline float get(Raw x) { return x; }
  static inline Raw put(float x) { return x; }
};

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

struct BFloat16 {
  using Raw = uint16_t;
  static inline float get(Raw x) { return float_of(static_cast<uint32_t>(x) << 16); }
  static inline Raw put(float x) {  // to nearest, ties to even
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    return static_cast<Raw>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
  }
};

struct Float16 {
  using Raw = uint16_t;
#if defined(__F16C__)
  static inline float get(Raw x) { return _cvtsh_ss(x); }
  static inline Raw put(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
  static inline float get(Raw x) {
    const uint32_t magnitude = x & 0x7FFFu;
    // Moving exponent and mantissa into place leaves the exponent 112 too small, denormals included.
    const uint32_t finite = bits_of(float_of(magnitude << 13) * 0x1p112f);
    const uint32_t special = (magnitude << 13) | 0x7F800000u;  // infinity and NaN
    return float_of((magnitude >= 0x7C00u ? special : finite) | static_cast<uint32_t>(x & 0x8000u) << 16);
  }
  static inline Raw put(float x) {  // to nearest, ties to even
    const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude - 0x38000000u + 0x0FFF + ((magnitude >> 13) & 1)) >> 13;
    // Adding 0.5 lines the last bit of fp16's denormals up with the last bit of fp32.
    const uint32_t denormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t half = magnitude < 0x38800000u ? denormal : normal;
    half = magnitude >= 0x477FF000u ? 0x7C00u : half;                     // rounds to 65536 or more
    half = magnitude > 0x7F800000u ? 0x7E00u : half;                      // NaN
    return static_cast<Raw>(half | sign);
  }
#endif
};
