// The row kernels of fused_norm, in GCC vector types. fused_norm.cpp includes this file once for each instruction set,
// inside a namespace that defines kLanes (floats in a vector register), and where instructions convert float16
// (kConverts) also RawHalves, from_halves() and to_halves(). So the arithmetic that a machine with AVX2 tests is the
// same source that a machine with AVX-512 runs.

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Bits __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));

// What a group of values is called as floats, as their bits and as 16-bit numbers: a vector, or one at a row's end.
struct Many {
  using Floats = Vector;
  using Words = Bits;
  using Shorts = Halves;
};
struct One {
  using Floats = float;
  using Words = uint32_t;
  using Shorts = uint16_t;
};

constexpr int kSums = 4;  // an addition takes 4 cycles: fewer independent sums would wait for each other

// A vector must not cross a call.
#define INLINE_LAMBDA __attribute__((always_inline))
#define INLINE INLINE_LAMBDA inline

template <class To, class From>
INLINE To same_bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "another size has other bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class Group>
INLINE typename Group::Words widened(typename Group::Shorts shorts) {
  if constexpr (std::is_same_v<Group, One>)
    return shorts;
  else
    return __builtin_convertvector(shorts, Bits);
}

template <class Group>
INLINE typename Group::Shorts narrowed(typename Group::Words words) {
  if constexpr (std::is_same_v<Group, One>)
    return static_cast<uint16_t>(words);
  else
    return __builtin_convertvector(words, Halves);
}

// The element types: `floats` widens, `stored` rounds to the nearest, ties to even.

struct Float32 {
  using Element = float;
  template <class Group>
  static INLINE typename Group::Floats floats(typename Group::Floats values) {
    return values;
  }
  template <class Group>
  static INLINE typename Group::Floats stored(typename Group::Floats values) {
    return values;
  }
};

struct BFloat16 {
  using Element = uint16_t;
  template <class Group>
  static INLINE typename Group::Floats floats(typename Group::Shorts shorts) {
    return same_bits<typename Group::Floats>(widened<Group>(shorts) << 16);
  }
  template <class Group>
  static INLINE typename Group::Shorts stored(typename Group::Floats values) {
    using Words = typename Group::Words;
    const Words bits = same_bits<Words>(values);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return narrowed<Group>((bits & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded);
  }
};

struct Float16 {
  using Element = uint16_t;
  template <class Group>
  static INLINE typename Group::Floats floats(typename Group::Shorts shorts) {
    if constexpr (kConverts && std::is_same_v<Group, Many>)
      return same_bits<Vector>(from_halves(same_bits<RawHalves>(shorts)));
    using Words = typename Group::Words;
    using Floats = typename Group::Floats;
    const Words bits = widened<Group>(shorts);
    const Words moved = (bits & 0x7fff) << 13;
    const Floats scaled = same_bits<Floats>(moved) * 0x1p112f;  // the exponents' biases differ by 112
    const Words magnitude = (bits & 0x7c00) == 0x7c00 ? moved | 0x7f800000 : same_bits<Words>(scaled);
    return same_bits<Floats>(magnitude | ((bits & 0x8000) << 16));
  }
  template <class Group>
  static INLINE typename Group::Shorts stored(typename Group::Floats values) {
    if constexpr (kConverts && std::is_same_v<Group, Many>) return same_bits<Halves>(to_halves(values));
    using Words = typename Group::Words;
    using Floats = typename Group::Floats;
    const Words bits = same_bits<Words>(values);
    const Words magnitude = bits & 0x7fffffff;
    const Words rounded = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Words normal = rounded > 0x7c00 ? Words{} + 0x7c00 : rounded;
    // The last bit of numbers around 0.5 is worth what the last bit of a denormal half is: the sum rounds there.
    const Words denormal = same_bits<Words>(same_bits<Floats>(magnitude) + 0.5f) - 0x3f000000;
    const Words finite = magnitude < 0x38800000 ? denormal : normal;
    const Words result = magnitude > 0x7f800000 ? Words{} + 0x7e00 : finite;
    return narrowed<Group>(result | ((bits >> 16) & 0x8000));
  }
};

template <class Group, class Type>
INLINE typename Group::Floats load(const typename Type::Element* from) {
  decltype(Type::template stored<Group>(typename Group::Floats{})) raw;
  std::memcpy(&raw, from, sizeof raw);
  return Type::template floats<Group>(raw);
}

template <class Group, class Type>
INLINE void store(typename Type::Element* to, typename Group::Floats values) {
  const auto raw = Type::template stored<Group>(values);
  std::memcpy(to, &raw, sizeof raw);
}

struct Moments {
  float sum, squares;
};

// The sum of what `value(Group, index)` gives for each index of a row, and of its squares.
template <class Value>
INLINE Moments moments(int64_t width, const Value& value) {
  Vector sum[kSums] = {}, squares[kSums] = {};
  int64_t j = 0;
  for (; j + kSums * kLanes <= width; j += kSums * kLanes)
#pragma GCC unroll 4
    for (int s = 0; s < kSums; ++s) {
      const Vector values = value(Many{}, j + s * kLanes);
      sum[s] += values;
      squares[s] += values * values;
    }
  for (; j + kLanes <= width; j += kLanes) {
    const Vector values = value(Many{}, j);
    sum[0] += values;
    squares[0] += values * values;
  }
  Moments total{0, 0};
  for (; j < width; ++j) {
    const float one = value(One{}, j);
    total.sum += one;
    total.squares += one * one;
  }
  for (int s = 1; s < kSums; ++s) sum[0] += sum[s], squares[0] += squares[s];
  for (int lane = 0; lane < kLanes; ++lane) total.sum += sum[0][lane], total.squares += squares[0][lane];
  return total;
}

template <class Each>
INLINE void for_each_group(int64_t width, const Each& each) {
  int64_t j = 0;
  for (; j + kLanes <= width; j += kLanes) each(Many{}, j);
  for (; j < width; ++j) each(One{}, j);
}

// Norms the rows [first, last). What a row's sums are taken of stays in `wide`, as floats.
template <class Type>
void norm_rows(const Problem& problem, int64_t first, int64_t last) {
  using Element = typename Type::Element;
  const int64_t width = problem.width;
  const auto* weight = static_cast<const Element*>(problem.weight);
  const auto* bias = static_cast<const Element*>(problem.bias);
  const std::unique_ptr<float[]> buffer(new float[width]);
  float* const wide = buffer.get();
  for (int64_t row = first; row < last; ++row) {
    const auto* x = static_cast<const Element*>(problem.x) + row * width;
    const auto* residual = static_cast<const Element*>(problem.residual) + (problem.residual ? row * width : 0);
    auto* summed = static_cast<Element*>(problem.summed) + (problem.summed ? row * width : 0);
    auto* normed = static_cast<Element*>(problem.normed) + row * width;
    const Moments plain = moments(width, [&](auto group, int64_t j) INLINE_LAMBDA {
      using Group = decltype(group);
      auto values = load<Group, Type>(x + j);
      if (problem.residual) {
        store<Group, Type>(summed + j, values + load<Group, Type>(residual + j));
        values = load<Group, Type>(summed + j);  // the norm is that of the sum as it is stored
      }
      std::memcpy(wide + j, &values, sizeof values);
      return values;
    });
    float mean = 0, rest = 0, variance = plain.squares / width;
    if (!problem.is_rms) {
      // The corrected two-pass algorithm (Chan, Golub, LeVeque, 1983): the sum of the deviations would be zero but
      // for the mean's own rounding, so a large mean costs no digits.
      mean = plain.sum / width;
      const Moments centred = moments(width, [&](auto group, int64_t j) INLINE_LAMBDA {
        return load<decltype(group), Float32>(wide + j) - mean;
      });
      rest = centred.sum / width;
      variance = std::max(centred.squares / width - rest * rest, 0.0f);
    }
    const float scale = 1.0f / std::sqrt(variance + problem.eps);
    for_each_group(width, [&](auto group, int64_t j) INLINE_LAMBDA {
      using Group = decltype(group);
      auto values = (load<Group, Float32>(wide + j) - mean - rest) * scale;
      if (weight) values *= load<Group, Type>(weight + j);
      if (bias) values += load<Group, Type>(bias + j);
      store<Group, Type>(normed + j, values);
    });
  }
}

#undef INLINE
#undef INLINE_LAMBDA
