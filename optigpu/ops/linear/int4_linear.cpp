// y = x @ weight.T + bias with 4-bit weights in groups and floating-point activations, for CPUs.
// weight[j, k] = (q[j, k] - 8) * scale[j, k / group] (+ offset[j, k / group]), with q from 0 to 15.
//
// One generated token reads each weight once, so what counts is that decoding the weights keeps up with the memory.
// Widening each 4-bit weight to a float does not: it takes three instructions for 16 of them. So the activations of a
// group are written as x = step * (65536 a + 256 b + c), whole numbers a, b, c of 8 bits and a power of two, which is
// as precise as a float32 of the size of the group's largest: nothing is quantized but in the way that each sum in
// float32 rounds. The products are then sums of small whole numbers, exact, at 64 in one instruction.
//
// Registered through PyTorch's stable C ABI; int8_linear.cpp says why.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../bfloat16.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kTile = 32;         // outputs whose weights lie together
constexpr int kBlockInputs = 8;   // a block: 8 inputs of each of 32 outputs, 128 bytes
constexpr int kBlockBytes = 128;  // an output's 4 bytes: inputs 0 to 3 in their low halves, 4 to 7 in the high ones
constexpr int kDigits = 3;        // of 8 bits for each activation
constexpr int kQuadBytes = 16;    // four activations: their lowest digits, middle ones, highest ones, and nothing
constexpr int kChunk = 32;        // inputs whose products fit 16 bits: 16 of at most 15 * 128 in each half of a lane
constexpr int kMostGroup = 4096;  // inputs of a group whose two lower digits' products fit 32 bits together

typedef int32_t Four __attribute__((vector_size(16)));

struct Group {  // of one row of x
  Four start;   // -8 times the sum of each digit: what makes -8 to 7 of 0 to 15
  float step;   // NaN where an activation is not finite
  float sum;    // of the activations
};

struct Problem {
  const void* x;           // [rows, inner], float32 or bfloat16
  const uint8_t* packed;   // [tiles, inner / 8, 128]
  const uint16_t* scale;   // bfloat16 [tiles, groups, kTile]
  const uint16_t* offset;  // the same, or null
  const float* bias;       // [outputs], or null
  void* y;                 // [rows, outputs], of the type of x
  bool is_bfloat16;
  int64_t rows, inner, outputs, group;
  int8_t* digits;  // [rows, inner / 4, 16]
  Group* groups;   // [rows, inner / group]
};

void store_outputs(const Problem& problem, const float* sums, int64_t row, int64_t first) {
  const int64_t count = std::min<int64_t>(kTile, problem.outputs - first);
  const int64_t offset = row * problem.outputs + first;
  for (int64_t j = 0; j < count; ++j) {
    const float value = problem.bias ? sums[j] + problem.bias[first + j] : sums[j];
    if (problem.is_bfloat16)
      static_cast<uint16_t*>(problem.y)[offset + j] = to_bfloat16(value);
    else
      static_cast<float*>(problem.y)[offset + j] = value;
  }
}

// A power of two in which the group's largest activation has 22 or 23 bits and a sign, as 1 / step and step.
struct Step {
  float inverse, value;
};

Step step_for(uint32_t largest) {  // the bits of its magnitude
  constexpr uint32_t kInfinity = 0x7f800000, kLeast = 24;
  constexpr uint32_t kMostMantissa = 0x7efefe;  // of 127 * 65536 + 127 * 256 + 127, the largest of three digits
  if (largest >= kInfinity) return {0, std::numeric_limits<float>::quiet_NaN()};
  const uint32_t exponent = std::max(kLeast, (largest >> 23) + ((largest & 0x7fffff) > kMostMantissa ? 1 : 0));
  const uint32_t value = (exponent - 22) << 23, inverse = (254 - (exponent - 22)) << 23;
  Step step;
  std::memcpy(&step.inverse, &inverse, sizeof inverse);
  std::memcpy(&step.value, &value, sizeof value);
  return step;
}

namespace portable {
constexpr int kLanes = 4;
constexpr int kMaxRows = 2, kMostSums = 2;
constexpr bool kWidePartial = false;
typedef int16_t Partial __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
inline Partial add_products(Partial sums, Ints weights, int32_t x) {
  const Partial w = (Partial)weights, digits = (Partial)(Ints{} + x);
  return sums + (w & 0xff) * (digits << 8 >> 8) + (w >> 8) * (digits >> 8);
}
inline Ints widen(Partial sums) { return ((Ints)sums << 16 >> 16) + ((Ints)sums >> 16); }
inline Ints load_halves(const uint16_t* p) { return Ints{p[0], p[1], p[2], p[3]}; }
inline Ints by_digit(Ints quad) {
  int8_t from[16], to[16];
  std::memcpy(from, &quad, sizeof from);
  for (int i = 0; i < 16; ++i) to[i] = from[i % 4 * 4 + i / 4];
  std::memcpy(&quad, to, sizeof to);
  return quad;
}
#include "int4_linear_kernel.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8;
constexpr int kMaxRows = 2, kMostSums = 4;
constexpr bool kWidePartial = false;
typedef int16_t Partial __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
inline Partial add_products(Partial sums, Ints weights, int32_t x) {
  return sums + (Partial)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(x));
}
inline Ints widen(Partial sums) { return (Ints)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
inline Ints load_halves(const uint16_t* p) {
  return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Ints by_digit(Ints quads) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (Ints)_mm256_shuffle_epi8((__m256i)quads, _mm256_broadcastsi128_si256(order));
}
#include "int4_linear_kernel.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")
namespace avx512 {
constexpr int kLanes = 16;
constexpr int kMaxRows = 3, kMostSums = 6;
constexpr bool kWidePartial = false;
typedef int16_t Partial __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
inline Partial add_products(Partial sums, Ints weights, int32_t x) {
  return sums + (Partial)_mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(x));
}
inline Ints widen(Partial sums) { return (Ints)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
inline Ints load_halves(const uint16_t* p) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Ints by_digit(Ints quads) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (Ints)_mm512_shuffle_epi8((__m512i)quads, _mm512_broadcast_i32x4(order));
}
#include "int4_linear_kernel.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vnni")
namespace avx512_vnni {
constexpr int kLanes = 16;
constexpr int kMaxRows = 3, kMostSums = 6;
constexpr bool kWidePartial = true;
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef Ints Partial;
inline Partial add_products(Partial sums, Ints weights, int32_t x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(x));
}
inline Ints widen(Partial sums) { return sums; }
inline Ints load_halves(const uint16_t* p) { return (Ints)avx512::load_halves(p); }
inline Ints by_digit(Ints quads) { return (Ints)avx512::by_digit((avx512::Ints)quads); }
#include "int4_linear_kernel.h"
}  // namespace avx512_vnni
#pragma GCC pop_options
#endif

// The numbers are the operator's `instruction_set` argument; int4_linear.py has the same table.
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3, kAvx512Vnni = 4 };

bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
  if (instruction_set == kAvx512) return avx512;
  if (instruction_set == kAvx512Vnni) return avx512 && __builtin_cpu_supports("avx512vnni");
#endif
  return false;
}

int64_t best_instruction_set() {
  static const int64_t best = cpu_has(kAvx512Vnni) ? kAvx512Vnni
                              : cpu_has(kAvx512)   ? kAvx512
                              : cpu_has(kAvx2)     ? kAvx2
                                                   : kPortable;
  return best;
}

struct Kernel {
  void (*write_digits)(const Problem&, int64_t, int64_t);  // of the rows [first, last)
  void (*run_tiles)(const Problem&, int64_t, int64_t);     // the tiles [first, last)
};

Kernel kernel_for(int64_t instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == kAvx512Vnni) return {avx512_vnni::write_digits, avx512_vnni::run_tiles};
  if (instruction_set == kAvx512) return {avx512::write_digits, avx512::run_tiles};
  if (instruction_set == kAvx2) return {avx2::write_digits, avx2::run_tiles};
#endif
  return {portable::write_digits, portable::run_tiles};
}

void check(const Tensor& x, const Tensor& packed, const Tensor& scale, const std::optional<Tensor>& offset,
           const std::optional<Tensor>& bias, int64_t outputs) {
  STD_TORCH_CHECK(x.dim() >= 1 && (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "int4_linear: x must be float32 or bfloat16 with at least one dimension");
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                      packed.size(1) * kBlockInputs == x.size(-1) && packed.size(2) == kBlockBytes &&
                      outputs > 0 && (outputs + kTile - 1) / kTile == packed.size(0),
                  "int4_linear: packed must be the contiguous uint8 tensor that pack_int4() made for x's last dimension");
  STD_TORCH_CHECK(scale.dim() == 3 && scale.scalar_type() == ScalarType::BFloat16 && scale.is_contiguous() &&
                      scale.size(0) == packed.size(0) && scale.size(1) > 0 && scale.size(2) == kTile &&
                      x.size(-1) % (scale.size(1) * kChunk) == 0 && x.size(-1) / scale.size(1) <= kMostGroup,
                  "int4_linear: scale must be the contiguous bfloat16 tensor that pack_int4() made");
  STD_TORCH_CHECK(!offset || (offset->dim() == 3 && offset->scalar_type() == ScalarType::BFloat16 &&
                              offset->is_contiguous() && offset->numel() == scale.numel()),
                  "int4_linear: offset must be the contiguous bfloat16 tensor that pack_int4() made");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->scalar_type() == ScalarType::Float && bias->is_contiguous() &&
                            bias->size(0) == outputs),
                  "int4_linear: bias must be a contiguous float32 vector with one value per output");
}

Tensor int4_linear(const Tensor& x_any, const Tensor& packed, const Tensor& scale, std::optional<Tensor> offset,
                   std::optional<Tensor> bias, int64_t outputs, int64_t instruction_set) {
  check(x_any, packed, scale, offset, bias, outputs);
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  STD_TORCH_CHECK(cpu_has(instruction_set), "int4_linear: this CPU lacks instruction set ", instruction_set);
  const Tensor x = x_any.is_contiguous() ? x_any : torch::stable::contiguous(x_any);
  const int64_t inner = x.size(-1), groups = scale.size(1);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor y = torch::stable::new_empty(x, shape);
  if (y.numel() == 0) return y;
  const int64_t rows = y.numel() / outputs;
  const std::unique_ptr<int8_t[]> digits(new int8_t[rows * inner * (kQuadBytes / 4)]);
  const std::unique_ptr<Group[]> group_facts(new Group[rows * groups]);
  const Problem problem{x.const_data_ptr(),
                        static_cast<const uint8_t*>(packed.const_data_ptr()),
                        static_cast<const uint16_t*>(scale.const_data_ptr()),
                        offset ? static_cast<const uint16_t*>(offset->const_data_ptr()) : nullptr,
                        bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr,
                        y.mutable_data_ptr(),
                        x.scalar_type() == ScalarType::BFloat16,
                        rows,
                        inner,
                        outputs,
                        inner / groups,
                        digits.get(),
                        group_facts.get()};
  const Kernel kernel = kernel_for(instruction_set);
  // Waking a thread costs about as much as these many activations, and these many products.
  const int64_t row_grain = 1 + (int64_t{1} << 15) / inner;
  const int64_t tile_grain = 1 + (int64_t{1} << 18) / (kTile * inner * rows);
  torch::stable::parallel_for(0, rows, row_grain,
                              [&](int64_t first, int64_t last) { kernel.write_digits(problem, first, last); });
  torch::stable::parallel_for(0, packed.size(0), tile_grain,
                              [&](int64_t first, int64_t last) { kernel.run_tiles(problem, first, last); });
  return y;
}

}  // namespace

extern "C" int64_t optigpu_best_int4_instruction_set() { return best_instruction_set(); }

STABLE_TORCH_LIBRARY_FRAGMENT(optigpu, library) {
  library.def(
      "int4_linear(Tensor x, Tensor packed, Tensor scale, Tensor? offset, Tensor? bias, int outputs, "
      "int instruction_set=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(optigpu, CPU, library) { library.impl("int4_linear", TORCH_BOX(&int4_linear)); }
