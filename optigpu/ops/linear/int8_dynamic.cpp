// y = (x @ weight.T) * scale + bias with int8 weights and activations that are quantized to int8 here, row by row,
// for CPUs. Sums are 32-bit integers and exact.
//
// The instruction of AVX-512 VNNI that multiplies bytes wants one operand without a sign. Here that is the weights:
// they are stored as q + 128, so that the activations keep their sign and can be broadcast from memory within the
// instruction, and what 128 adds to a sum is 128 times the sum of the row's activations: one number for each row,
// which falls off while the row is quantized. All paths read these weights and subtract that number.

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

constexpr int kTile = 32;  // outputs that lie together: two AVX-512 registers of sums
constexpr int kGroup = 4;  // inputs that lie together: what one 32-bit lane multiplies and adds at once
constexpr int kOffset = 128;
constexpr int32_t kLargest = 127;
// 255 * 127 * inner must fit a 32-bit integer.
constexpr int64_t kMostInner = 65536;
// 1.5 * 2^23: adding it leaves the integer part of a small float in the lowest bits of the sum.
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

struct Row {
  float scale;
  int32_t sum;  // of the row's quantized activations
};

struct Problem {
  const int8_t* x;        // [rows, inner]
  const Row* x_rows;      // [rows]
  const uint8_t* packed;  // [tiles, inner / kGroup, kTile, kGroup]
  const float* scale;     // [outputs]
  const float* bias;      // [outputs], or null
  void* y;                // [rows, outputs], float32 or bfloat16
  bool y_is_bfloat16;
  int64_t rows, inner, outputs;  // inner: filled up to a multiple of kGroup
};

void store_outputs(const Problem& problem, const int32_t* sums, int64_t row, int64_t first) {
  const int64_t count = std::min<int64_t>(kTile, problem.outputs - first);
  const int64_t offset = row * problem.outputs + first;
  const Row x = problem.x_rows[row];
  float values[kTile];
  for (int64_t j = 0; j < count; ++j)
    values[j] = static_cast<float>(sums[j] - kOffset * x.sum) * (x.scale * problem.scale[first + j]);
  if (problem.bias)
    for (int64_t j = 0; j < count; ++j) values[j] += problem.bias[first + j];
  if (problem.y_is_bfloat16)
    std::transform(values, values + count, static_cast<uint16_t*>(problem.y) + offset, to_bfloat16);
  else
    std::copy(values, values + count, static_cast<float*>(problem.y) + offset);
}

namespace portable {
constexpr int kPartOutputs = 4, kPartsAtOnce = 2, kMaxRows = 4;
struct Part {
  const uint8_t* weights;
};
struct Inputs {
  const int8_t* x;
};
typedef int32_t Sums __attribute__((vector_size(16)));
inline Part load_part(const uint8_t* p) { return {p}; }
inline Inputs broadcast(const int8_t* p) { return {p}; }
inline Sums add_products(Sums sums, Part part, Inputs inputs) {
  for (int j = 0; j < kPartOutputs; ++j)
    for (int k = 0; k < kGroup; ++k) sums[j] += int32_t{part.weights[j * kGroup + k]} * inputs.x[k];
  return sums;
}
inline void store_sums(Sums sums, int32_t* p) { std::memcpy(p, &sums, sizeof sums); }
#include "int8_dynamic_kernel.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
// The instruction for bytes (vpmaddubsw) saturates at 16 bits, so weights and activations are widened to 16 bits.
namespace avx2 {
constexpr int kPartOutputs = 4, kPartsAtOnce = 4, kMaxRows = 3;
typedef __m256i Part;    // 4 outputs of 4 inputs, 16 bits each
typedef __m256i Inputs;  // 4 inputs, 16 bits each, four times
typedef int32_t Sums __attribute__((vector_size(32)));  // two halves of the sum of each of 4 outputs
inline Part load_part(const uint8_t* p) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Inputs broadcast(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(four)));
}
inline Sums add_products(Sums sums, Part part, Inputs inputs) {
  return sums + reinterpret_cast<Sums>(_mm256_madd_epi16(part, inputs));
}
inline void store_sums(Sums sums, int32_t* p) {
  for (int j = 0; j < kPartOutputs; ++j) p[j] = sums[2 * j] + sums[2 * j + 1];
}
#include "int8_dynamic_kernel.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")
namespace vnni {
constexpr int kPartOutputs = 16, kPartsAtOnce = 2, kMaxRows = 12;
typedef __m512i Part;    // 16 outputs of 4 inputs
typedef __m512i Inputs;  // 4 inputs, 16 times
typedef int32_t Sums __attribute__((vector_size(64)));
inline Part load_part(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Inputs broadcast(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return _mm512_set1_epi32(four);
}
inline Sums add_products(Sums sums, Part part, Inputs inputs) {
  return reinterpret_cast<Sums>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), part, inputs));
}
inline void store_sums(Sums sums, int32_t* p) { std::memcpy(p, &sums, sizeof sums); }
#include "int8_dynamic_kernel.h"
}  // namespace vnni
#pragma GCC pop_options
#endif

// The numbers are the operator's `instruction_set` argument; int8_dynamic.py has the same table.
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kVnni = 3 };

bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2");
  if (instruction_set == kVnni)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
  return false;
}

int64_t best_instruction_set() {
  static const int64_t best = cpu_has(kVnni) ? kVnni : cpu_has(kAvx2) ? kAvx2 : kPortable;
  return best;
}

using RunTiles = void (*)(const Problem&, int64_t, int64_t);
using QuantizeRow = Row (*)(const float*, int64_t, int64_t, int8_t*);

struct Kernels {
  RunTiles run_tiles;
  QuantizeRow quantize_row;
};

Kernels kernels_for(int64_t instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == kVnni) return {vnni::run_tiles, vnni::quantize_row};
  if (instruction_set == kAvx2) return {avx2::run_tiles, avx2::quantize_row};
#endif
  return {portable::run_tiles, portable::quantize_row};
}

void check(const Tensor& x, const Tensor& packed, const Tensor& scale, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1 && (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "int8_dynamic: x must be float32 or bfloat16 with at least one dimension");
  STD_TORCH_CHECK(packed.dim() == 4 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() &&
                      packed.size(1) == (x.size(-1) + kGroup - 1) / kGroup && packed.size(2) == kTile &&
                      packed.size(3) == kGroup && x.size(-1) <= kMostInner,
                  "int8_dynamic: packed must be the contiguous tensor that pack_dynamic() made for x's last dimension");
  STD_TORCH_CHECK(scale.dim() == 1 && scale.scalar_type() == ScalarType::Float && scale.is_contiguous() &&
                      (scale.size(0) + kTile - 1) / kTile == packed.size(0),
                  "int8_dynamic: scale must be a contiguous float32 vector with one value per output");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->scalar_type() == ScalarType::Float && bias->is_contiguous() &&
                            bias->size(0) == scale.size(0)),
                  "int8_dynamic: bias must be a contiguous float32 vector with one value per output");
}

struct Quantized {
  std::unique_ptr<int8_t[]> x;  // [rows, padded]
  std::unique_ptr<Row[]> rows;
};

Quantized quantized(const Tensor& x, int64_t rows, int64_t padded, QuantizeRow quantize_row) {
  const int64_t inner = x.size(-1);
  Quantized all{std::unique_ptr<int8_t[]>(new int8_t[rows * padded]), std::unique_ptr<Row[]>(new Row[rows])};
  // Waking a thread costs about as much as 16 Ki activations.
  const int64_t grain = 1 + (int64_t{1} << 14) / std::max<int64_t>(inner, 1);
  torch::stable::parallel_for(0, rows, grain, [&](int64_t first, int64_t last) {
    const bool is_bfloat16 = x.scalar_type() == ScalarType::BFloat16;
    std::vector<float> wide(is_bfloat16 ? inner : 0);
    for (int64_t row = first; row < last; ++row) {
      const float* values = static_cast<const float*>(x.const_data_ptr()) + (is_bfloat16 ? 0 : row * inner);
      if (is_bfloat16) {
        const auto* bits = static_cast<const uint16_t*>(x.const_data_ptr()) + row * inner;
        std::transform(bits, bits + inner, wide.begin(), from_bfloat16);
        values = wide.data();
      }
      all.rows[row] = quantize_row(values, inner, padded, all.x.get() + row * padded);
    }
  });
  return all;
}

Tensor int8_dynamic(const Tensor& x_any, const Tensor& packed, const Tensor& scale, std::optional<Tensor> bias,
                    int64_t instruction_set) {
  check(x_any, packed, scale, bias);
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  STD_TORCH_CHECK(cpu_has(instruction_set), "int8_dynamic: this CPU lacks instruction set ", instruction_set);
  const Tensor x = x_any.is_contiguous() ? x_any : torch::stable::contiguous(x_any);
  const int64_t padded = packed.size(1) * kGroup, outputs = scale.size(0);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor y = torch::stable::new_empty(x, shape);
  if (y.numel() == 0) return y;
  const int64_t rows = y.numel() / outputs;
  const Kernels kernels = kernels_for(instruction_set);
  const Quantized all = quantized(x, rows, padded, kernels.quantize_row);
  const Problem problem{all.x.get(),
                        all.rows.get(),
                        static_cast<const uint8_t*>(packed.const_data_ptr()),
                        static_cast<const float*>(scale.const_data_ptr()),
                        bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr,
                        y.mutable_data_ptr(),
                        x.scalar_type() == ScalarType::BFloat16,
                        rows,
                        padded,
                        outputs};
  // Waking a thread costs about as much as 256 Ki multiply-adds of bytes.
  const int64_t grain = 1 + (int64_t{1} << 18) / (kTile * std::max<int64_t>(padded, 1) * rows);
  torch::stable::parallel_for(0, packed.size(0), grain,
                              [&](int64_t first, int64_t last) { kernels.run_tiles(problem, first, last); });
  return y;
}

}  // namespace

extern "C" int64_t optigpu_best_dynamic_instruction_set() { return best_instruction_set(); }

STABLE_TORCH_LIBRARY_FRAGMENT(optigpu, library) {
  library.def(
      "int8_dynamic(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int instruction_set=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(optigpu, CPU, library) { library.impl("int8_dynamic", TORCH_BOX(&int8_dynamic)); }
