// y = (x @ weight.T) * scale + bias with int8 weights and floating-point activations, for CPUs.
// It reads each weight once: one generated token costs about (bytes of the weights) / (memory bandwidth).
//
// Registered through PyTorch's stable C ABI: this file compiles in 6 s (torch/extension.h alone takes 45 s and
// torch/library.h 12 s), needs neither ninja nor Python's headers, is called like any built-in operator, also from
// inside a compiled graph, and torch_parallel_for runs it on PyTorch's own threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
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

constexpr int kTile = 16;  // outputs that are computed together: one AVX-512 register of floats, two of AVX2

struct Problem {
  const float* x;        // [rows, inner]
  const int8_t* packed;  // [tiles, inner, kTile]
  const float* scale;    // [outputs]
  const float* bias;     // [outputs], or null
  void* y;               // [rows, outputs], float32 or bfloat16
  bool y_is_bfloat16;
  int64_t rows, inner, outputs;
};

void store_outputs(const Problem& problem, const float* sums, int64_t row, int64_t first) {
  const int64_t count = std::min<int64_t>(kTile, problem.outputs - first);
  const int64_t offset = row * problem.outputs + first;
  for (int64_t j = 0; j < count; ++j) {
    float value = sums[j] * problem.scale[first + j];
    if (problem.bias) value += problem.bias[first + j];
    if (problem.y_is_bfloat16)
      static_cast<uint16_t*>(problem.y)[offset + j] = to_bfloat16(value);
    else
      static_cast<float*>(problem.y)[offset + j] = value;
  }
}

namespace portable {
constexpr int kLanes = 4;
typedef float Weights __attribute__((vector_size(kLanes * sizeof(float))));
inline Weights load_weights(const int8_t* p) {
  return Weights{float(p[0]), float(p[1]), float(p[2]), float(p[3])};
}
#include "int8_linear_kernel.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8;
inline __m256 load_weights(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#include "int8_linear_kernel.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
constexpr int kLanes = 16;
inline __m512 load_weights(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#include "int8_linear_kernel.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

// The numbers are the operator's `instruction_set` argument; int8_linear.py has the same table.
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (instruction_set == kAvx512) return __builtin_cpu_supports("avx512f");
#endif
  return false;
}

int64_t best_instruction_set() {
  static const int64_t best = cpu_has(kAvx512) ? kAvx512 : cpu_has(kAvx2) ? kAvx2 : kPortable;
  return best;
}

using RunTiles = void (*)(const Problem&, int64_t, int64_t);

RunTiles run_tiles_for(int64_t instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == kAvx512) return avx512::run_tiles;
  if (instruction_set == kAvx2) return avx2::run_tiles;
#endif
  return portable::run_tiles;
}

void check(const Tensor& x, const Tensor& packed, const Tensor& scale, const std::optional<Tensor>& bias) {
  STD_TORCH_CHECK(x.dim() >= 1 && (x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16),
                  "int8_linear: x must be float32 or bfloat16 with at least one dimension");
  STD_TORCH_CHECK(packed.dim() == 3 && packed.scalar_type() == ScalarType::Char && packed.is_contiguous() &&
                      packed.size(1) == x.size(-1) && packed.size(2) == kTile,
                  "int8_linear: packed must be the contiguous int8 tensor that pack() made for x's last dimension");
  STD_TORCH_CHECK(scale.dim() == 1 && scale.scalar_type() == ScalarType::Float && scale.is_contiguous() &&
                      (scale.size(0) + kTile - 1) / kTile == packed.size(0),
                  "int8_linear: scale must be a contiguous float32 vector with one value per output");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->scalar_type() == ScalarType::Float && bias->is_contiguous() &&
                            bias->size(0) == scale.size(0)),
                  "int8_linear: bias must be a contiguous float32 vector with one value per output");
}

std::unique_ptr<float[]> widened(const Tensor& x, int64_t count) {
  std::unique_ptr<float[]> wide(new float[count]);
  const auto* bits = static_cast<const uint16_t*>(x.const_data_ptr());
  std::transform(bits, bits + count, wide.get(), from_bfloat16);
  return wide;
}

Tensor int8_linear(const Tensor& x_any, const Tensor& packed, const Tensor& scale, std::optional<Tensor> bias,
                   int64_t instruction_set) {
  check(x_any, packed, scale, bias);
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  STD_TORCH_CHECK(cpu_has(instruction_set), "int8_linear: this CPU lacks instruction set ", instruction_set);
  const Tensor x = x_any.is_contiguous() ? x_any : torch::stable::contiguous(x_any);
  const bool is_bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  const int64_t inner = packed.size(1), outputs = scale.size(0);
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = outputs;
  Tensor y = torch::stable::new_empty(x, shape);
  if (y.numel() == 0) return y;
  const auto wide = is_bfloat16 ? widened(x, x.numel()) : nullptr;
  const Problem problem{is_bfloat16 ? wide.get() : static_cast<const float*>(x.const_data_ptr()),
                        static_cast<const int8_t*>(packed.const_data_ptr()),
                        static_cast<const float*>(scale.const_data_ptr()),
                        bias ? static_cast<const float*>(bias->const_data_ptr()) : nullptr,
                        y.mutable_data_ptr(),
                        is_bfloat16,
                        y.numel() / outputs,
                        inner,
                        outputs};
  // Waking a thread costs about as much as 64 Ki multiply-adds.
  const int64_t grain = 1 + (int64_t{1} << 16) / (kTile * std::max<int64_t>(inner, 1) * problem.rows);
  const RunTiles run_tiles = run_tiles_for(instruction_set);
  torch::stable::parallel_for(0, packed.size(0), grain,
                              [&](int64_t first, int64_t last) { run_tiles(problem, first, last); });
  return y;
}

}  // namespace

extern "C" int64_t optigpu_best_instruction_set() { return best_instruction_set(); }

STABLE_TORCH_LIBRARY_FRAGMENT(optigpu, library) {
  library.def(
      "int8_linear(Tensor x, Tensor packed, Tensor scale, Tensor? bias, int instruction_set=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(optigpu, CPU, library) { library.impl("int8_linear", TORCH_BOX(&int8_linear)); }
