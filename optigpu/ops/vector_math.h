// Functions of a vector of floats, in GCC vector types. Included once for each instruction set, inside a namespace that
// defines kLanes (floats in a vector register), so that the arithmetic which a machine with AVX2 tests is the same source
// that a machine with AVX-512 runs.
//
// The polynomials are minimax fits made for this file; each is wrong by less than 0.5 x 2^-24 of the value, so most of
// the error is rounding.

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Bits __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Bits bits_of(Vector value) {
  Bits bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline Vector float_of(Bits bits) {
  Vector value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline Vector filled(float value) { return Vector{} + value; }

inline Vector magnitude(Vector value) { return float_of(bits_of(value) & 0x7fffffff); }

inline Vector at_most(Vector value, float limit) {  // NaN stays NaN
  return value > limit ? filled(limit) : value;
}

// exp(high + low), where the sum lies between -kFar and 0 and high is the larger part, or NaN.
// exp(r) = 1 + r + r^2 q(r) for |r| <= ln(2) / 2, times 2^n in two factors: n reaches -163, and a factor -126.
inline Vector exp_of(Vector high, Vector low) {
  constexpr float kRound = 0x1.8p23f;  // a sum with it has no fraction, and its last bits are the whole number
  const Vector shifted = (high + low) * 0x1.715476p0f + kRound;
  const Vector n = shifted - kRound;
  const Bits whole = bits_of(shifted) - 0x4b400000, half = whole >> 1;
  // ln(2) in two parts, the first with so few bits that its product with n is exact
  const Vector r = high - n * 0.693359375f + n * 2.12194440e-4f + low;
  Vector q = filled(0.0013813144f);
  q = q * r + 0.0083694188f;
  q = q * r + 0.041668457f;
  q = q * r + 0.16666515f;
  q = q * r + 0.49999993f;
  const Vector value = q * (r * r) + r + 1.0f;
  return value * float_of((half + 127) << 23) * float_of((whole - half + 127) << 23);
}

constexpr float kFar = 112.5f;  // exp(-kFar) is zero in float32, denormals included

// 2^x for x from -infinity to 0, or NaN: 0 below -127. Wrong by less than 3 x 2^-24 of the value.
inline Vector power_of_two(Vector x) {
  constexpr float kRound = 0x1.8p23f;
  const Vector least = filled(-127), near = least > x ? least : x;  // NaN stays NaN
  const Vector shifted = near + kRound, r = near - (shifted - kRound);
  Vector q = filled(0.0013276472f);
  q = q * r + 0.009675541f;
  q = q * r + 0.05550713f;
  q = q * r + 0.2402212f;
  q = q * r + 0.69314694f;
  q = q * r + 1.0000001f;
  return q * float_of((bits_of(shifted) + 127) << 23);
}

constexpr float kLog2E = 1.44269504f;  // 2^(kLog2E x) = exp(x)

// x / (1 + exp(-s)), from exp(-|s|), which cannot overflow and loses nothing where the result is small.
inline Vector times_sigmoid(Vector x, Vector s) {
  const Vector e = exp_of(-at_most(magnitude(s), kFar), Vector{});
  return x * ((s < 0 ? e : filled(1)) / (1 + e));
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x sigmoid(c1 x + c2 x^3)
inline Vector gelu_tanh(Vector x) { return times_sigmoid(x, x * (1.5957691f + 0.071354814f * (x * x))); }

// x times the normal distribution's cumulative function, from its tail
//   tail(t) = exp(-t^2 / 2) w P(v), t = |x|, w = 1 / (1 + 11/32 t), v = 11/32 t w
// P is a polynomial in v and not in w = 1 - v, which would be rounded before the difference is taken. The square of t
// is made of an exact part and a small one: rounded, it would make the exponential wrong by up to 100 x 2^-24.
inline Vector gelu_erf(Vector x) {
  const Vector t = at_most(magnitude(x), 15);  // half of its square is kFar
  const Vector head = float_of(bits_of(t) & ~0xfff);
  const Vector e = exp_of(head * head * -0.5f, (t - head) * (t + head) * -0.5f);
  const Vector scaled = t * 0.34375f, w = 1 / (1 + scaled), v = scaled * w;
  Vector p = filled(-0.027538477323f);
  p = p * v + 0.07770527446f;
  p = p * v - 0.042148037943f;
  p = p * v - 0.025091281273f;
  p = p * v - 0.071952503351f;
  p = p * v + 0.092152215451f;
  p = p * v + 0.29455272169f;
  p = p * v - 0.66055921538f;
  p = p * v + 0.50000001285f;
  const Vector tail = e * (w * p);
  return x * (x < 0 ? tail : 1 - tail);
}
