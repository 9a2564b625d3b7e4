// The arithmetic of fused_activation.cpp, in GCC vector types. That file includes this one once for each instruction
// set, inside a namespace that defines kLanes (floats in a vector register), so that the arithmetic which a machine
// with AVX2 tests is the same source that a machine with AVX-512 runs.
//
// The bounds that the tests hold every instruction set to, for v = x + bias over all floats:
//   gelu with erf    12 x 2^-24 |exact|
//   gelu with tanh   4 (1 + |s|) x 2^-24 |exact|, where s = c1 v + c2 v^3 is the argument of its sigmoid
//   silu(v) up       6 x 2^-24 |exact|
// and (|v| + 1) x 2^-149 on top (times |up|), for exponentials and products so small that float32 holds few digits.

#include "../vector_math.h"

typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));

// ---- Elements in memory: `count` of them, at most kLanes; the lanes after them are zeros.

template <typename Stored, typename Register>
inline __attribute__((always_inline)) Register read_lanes(const Stored* from, int64_t count) {
  Register lanes = {};
  std::memcpy(&lanes, from, count * sizeof(Stored));
  return lanes;
}

inline __attribute__((always_inline)) Vector load(const float* from, int64_t count) {
  return read_lanes<float, Vector>(from, count);
}

inline __attribute__((always_inline)) Vector load(const Bfloat16* from, int64_t count) {
  return float_of(__builtin_convertvector(read_lanes<Bfloat16, Halves>(from, count), Bits) << 16);
}

// A float16 is read as a float32 with its exponent 112 too small, which one exact product makes right.
inline __attribute__((always_inline)) Vector load(const Float16* from, int64_t count) {
  const Bits half = __builtin_convertvector(read_lanes<Float16, Halves>(from, count), Bits);
  const Bits scaled = bits_of(float_of((half & 0x7fff) << 13) * 0x1p112f);
  const Bits exponent = (half & 0x7c00) == 0x7c00 ? Bits{} + 0x7f800000 : Bits{};
  return float_of(scaled | exponent | ((half & 0x8000) << 16));
}

inline __attribute__((always_inline)) void write_halves(void* to, Bits wide, int64_t count) {
  const Halves narrow = __builtin_convertvector(wide, Halves);
  std::memcpy(to, &narrow, count * sizeof(uint16_t));
}

inline __attribute__((always_inline)) void store(float* to, Vector value, int64_t count) {
  std::memcpy(to, &value, count * sizeof(float));
}

inline __attribute__((always_inline)) void store(Bfloat16* to, Vector value, int64_t count) {  // ties to even
  const Bits bits = bits_of(value);
  const Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  write_halves(to, value != value ? Bits{} + 0x7fc0 : rounded, count);
}

inline __attribute__((always_inline)) void store(Float16* to, Vector value, int64_t count) {  // ties to even
  const Bits bits = bits_of(value), size = bits & 0x7fffffff;
  // The last bit of a float32 next to 0.5 is 2^-24, which is float16's smallest step: the sum rounds as it must.
  const Bits denormal = bits_of(float_of(size) + 0.5f) - 0x3f000000;
  const Bits normal = (size + 0xfff + ((size >> 13) & 1) - (112 << 23)) >> 13;
  Bits half = size < (113 << 23) ? denormal : normal;
  half = size >= (143 << 23) ? Bits{} + 0x7c00 : half;
  half = size > 0x7f800000 ? Bits{} + 0x7e00 : half;
  write_halves(to, half | ((bits >> 16) & 0x8000), count);
}

// ---- Blocks of rows.

template <typename Element>
const float* widened(const Element* from, int64_t count, float* buffer) {
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) store(buffer + j, load(from + j, kLanes), kLanes);
  if (j < count) store(buffer + j, load(from + j, count - j), count - j);
  return buffer;
}

// The `count` biases from `first` on as floats, in `buffer` unless they lie so already.
inline const float* biases(const Problem& problem, int64_t first, int64_t count, float* buffer) {
  if (problem.bias_type == Type::kFloat) return static_cast<const float*>(problem.bias) + first;
  if (problem.bias_type == Type::kBfloat16)
    return widened(static_cast<const Bfloat16*>(problem.bias) + first, count, buffer);
  if (problem.bias_type == Type::kFloat16)
    return widened(static_cast<const Float16*>(problem.bias) + first, count, buffer);
  return kNoBias.data();
}

template <typename Element, Operation kOperation>
inline __attribute__((always_inline)) void run_lanes(const Element* x, const Element* up, const float* bias,
                                                     const float* up_bias, Element* y, int64_t lanes) {
  const Vector value = load(x, lanes) + load(bias, lanes);
  if (kOperation == Operation::kGeluErf) return store(y, gelu_erf(value), lanes);
  if (kOperation == Operation::kGeluTanh) return store(y, gelu_tanh(value), lanes);
  store(y, times_sigmoid(value, value) * (load(up, lanes) + load(up_bias, lanes)), lanes);
}

// The blocks [first, last): kBlock outputs of a row each, the last of a row may be shorter.
template <typename Element, Operation kOperation>
void run(const Problem& problem, int64_t first, int64_t last) {
  constexpr bool kGated = kOperation == Operation::kSwiglu;
  const int64_t blocks = (problem.outputs + kBlock - 1) / kBlock;
  float bias_buffer[kBlock], up_buffer[kBlock];
  for (int64_t block = first; block < last; ++block) {
    const int64_t row = block / blocks, begin = block % blocks * kBlock;
    const int64_t count = std::min<int64_t>(kBlock, problem.outputs - begin);
    const Element* x = static_cast<const Element*>(problem.x) + row * problem.outputs * (kGated ? 2 : 1) + begin;
    const Element* up = kGated ? x + problem.outputs : x;
    Element* y = static_cast<Element*>(problem.y) + row * problem.outputs + begin;
    const float* bias = biases(problem, begin, count, bias_buffer);
    const float* up_bias = kGated ? biases(problem, problem.outputs + begin, count, up_buffer) : bias;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes)
      run_lanes<Element, kOperation>(x + j, up + j, bias + j, up_bias + j, y + j, kLanes);
    if (j < count) run_lanes<Element, kOperation>(x + j, up + j, bias + j, up_bias + j, y + j, count - j);
  }
}

template <typename Element>
Run run_of(Operation operation) {
  if (operation == Operation::kGeluErf) return run<Element, Operation::kGeluErf>;
  if (operation == Operation::kGeluTanh) return run<Element, Operation::kGeluTanh>;
  return run<Element, Operation::kSwiglu>;
}

inline Run run_of(Operation operation, Type type) {
  if (type == Type::kBfloat16) return run_of<Bfloat16>(operation);
  if (type == Type::kFloat16) return run_of<Float16>(operation);
  return run_of<float>(operation);
}
