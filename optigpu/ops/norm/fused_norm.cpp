// LayerNorm and RMSNorm of a sum, for CPUs: the addition of the residual and the norm in one pass over memory.
// Registered through PyTorch's stable C ABI, as int8_linear.cpp says.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct Problem {  // all tensors have one element type
  const void* x;         // [rows, width]
  const void* residual;  // [rows, width], or null
  const void* weight;    // [width], or null
  const void* bias;      // [width], or null
  void* normed;          // [rows, width]
  void* summed;          // [rows, width]; null without a residual
  int64_t width;
  float eps;
  bool is_rms;
};

namespace portable {
constexpr int kLanes = 4;
constexpr bool kConverts = false;
struct RawHalves;  // none
#include "fused_norm.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
constexpr int kLanes = 8;
constexpr bool kConverts = true;
using RawHalves = __m128i;
inline __m256 from_halves(RawHalves halves) { return _mm256_cvtph_ps(halves); }
inline RawHalves to_halves(__m256 values) { return _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }
#include "fused_norm.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
constexpr int kLanes = 16;
constexpr bool kConverts = true;
using RawHalves = __m256i;
inline __m512 from_halves(RawHalves halves) { return _mm512_cvtph_ps(halves); }
inline RawHalves to_halves(__m512 values) { return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT); }
#include "fused_norm.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

// The numbers are the operators' `instruction_set` argument; fused_norm.py has the same table.
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
  if (instruction_set == kAvx512) return __builtin_cpu_supports("avx512f");
#endif
  return false;
}

int64_t best_instruction_set() {
  static const int64_t best = cpu_has(kAvx512) ? kAvx512 : cpu_has(kAvx2) ? kAvx2 : kPortable;
  return best;
}

using NormRows = void (*)(const Problem&, int64_t, int64_t);

NormRows by_type(ScalarType type, NormRows float32, NormRows bfloat16, NormRows float16) {
  return type == ScalarType::Float ? float32 : type == ScalarType::BFloat16 ? bfloat16 : float16;
}

NormRows norm_rows_for(int64_t instruction_set, ScalarType type) {
#if defined(__x86_64__)
  if (instruction_set == kAvx512)
    return by_type(type, avx512::norm_rows<avx512::Float32>, avx512::norm_rows<avx512::BFloat16>,
                   avx512::norm_rows<avx512::Float16>);
  if (instruction_set == kAvx2)
    return by_type(type, avx2::norm_rows<avx2::Float32>, avx2::norm_rows<avx2::BFloat16>,
                   avx2::norm_rows<avx2::Float16>);
#endif
  return by_type(type, portable::norm_rows<portable::Float32>, portable::norm_rows<portable::BFloat16>,
                 portable::norm_rows<portable::Float16>);
}

void check_like(const Tensor& x, const Tensor& other, const char* name, bool is_row) {
  const bool same_shape = is_row ? other.dim() == 1 && other.size(0) == x.size(-1)
                                 : std::equal(x.sizes().begin(), x.sizes().end(), other.sizes().begin(),
                                              other.sizes().end());
  STD_TORCH_CHECK(same_shape && other.scalar_type() == x.scalar_type(), "fused_norm: ", name,
                  " must have x's type and ", is_row ? "its last dimension" : "its shape");
}

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// An uninitialized tensor like `x`, which is dense. torch::stable::new_empty looks its operator up at each call.
Tensor unset_like(const Tensor& x) {
  int32_t type, device, index;
  STD_TORCH_CHECK(!aoti_torch_get_dtype(x.get(), &type) && !aoti_torch_get_device_type(x.get(), &device) &&
                      !aoti_torch_get_device_index(x.get(), &index),
                  "fused_norm: x has no type or device");
  AtenTensorHandle handle;
  const bool failed =
      aoti_torch_empty_strided(x.dim(), x.sizes().data(), x.strides().data(), type, device, index, &handle);
  STD_TORCH_CHECK(!failed, "fused_norm: out of memory");
  return Tensor(handle);
}

const void* data_of(const std::optional<Tensor>& tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

std::optional<Tensor> checked(const Tensor& x, const std::optional<Tensor>& other, const char* name, bool is_row) {
  if (!other) return std::nullopt;
  check_like(x, *other, name, is_row);
  return dense(*other);
}

// The norm of x + residual and that sum; x itself is returned as the sum where there is no residual.
std::tuple<Tensor, Tensor> norm(const Tensor& x_any, const std::optional<Tensor>& residual_any,
                                const std::optional<Tensor>& weight_any, const std::optional<Tensor>& bias_any,
                                double eps, bool is_rms, int64_t instruction_set) {
  const ScalarType type = x_any.scalar_type();
  const bool is_known = type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half;
  STD_TORCH_CHECK(is_known && x_any.dim() >= 1 && x_any.size(-1) >= 1,
                  "fused_norm: x must be float32, bfloat16 or float16 with at least one number in a row");
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  STD_TORCH_CHECK(cpu_has(instruction_set), "fused_norm: this CPU lacks instruction set ", instruction_set);
  const Tensor x = dense(x_any);
  const auto residual = checked(x, residual_any, "residual", false);
  const auto weight = checked(x, weight_any, "weight", true), bias = checked(x, bias_any, "bias", true);
  Tensor normed = unset_like(x);
  Tensor summed = residual ? unset_like(x) : x;
  if (x.numel() == 0) return {normed, summed};
  const int64_t width = x.size(-1);
  const Problem problem{x.const_data_ptr(),
                        data_of(residual),
                        data_of(weight),
                        data_of(bias),
                        normed.mutable_data_ptr(),
                        residual ? summed.mutable_data_ptr() : nullptr,
                        width,
                        static_cast<float>(eps),
                        is_rms};
  // Waking a thread costs about as much as norming some 16 Ki elements.
  const int64_t grain = 1 + (int64_t{1} << 14) / width;
  const NormRows norm_rows = norm_rows_for(instruction_set, type);
  torch::stable::parallel_for(0, x.numel() / width, grain,
                              [&](int64_t first, int64_t last) { norm_rows(problem, first, last); });
  return {normed, summed};
}

std::tuple<Tensor, Tensor> add_layer_norm(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                          std::optional<Tensor> bias, double eps, int64_t instruction_set) {
  return norm(x, residual, weight, bias, eps, false, instruction_set);
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, std::optional<Tensor> weight,
                                        double eps, int64_t instruction_set) {
  return norm(x, residual, weight, std::nullopt, eps, true, instruction_set);
}

Tensor layer_norm(const Tensor& x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps,
                  int64_t instruction_set) {
  return std::get<0>(norm(x, std::nullopt, weight, bias, eps, false, instruction_set));
}

Tensor rms_norm(const Tensor& x, std::optional<Tensor> weight, double eps, int64_t instruction_set) {
  return std::get<0>(norm(x, std::nullopt, weight, std::nullopt, eps, true, instruction_set));
}

}  // namespace

extern "C" int64_t optigpu_best_norm_instruction_set() { return best_instruction_set(); }

STABLE_TORCH_LIBRARY_FRAGMENT(optigpu, library) {
  library.def(
      "add_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, int instruction_set=0) -> "
      "(Tensor, Tensor)");
  library.def("add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, int instruction_set=0) -> "
              "(Tensor, Tensor)");
  library.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, int instruction_set=0) -> Tensor");
  library.def("rms_norm(Tensor x, Tensor? weight, float eps, int instruction_set=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(optigpu, CPU, library) {
  library.impl("add_layer_norm", TORCH_BOX(&add_layer_norm));
  library.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  library.impl("layer_norm", TORCH_BOX(&layer_norm));
  library.impl("rms_norm", TORCH_BOX(&rms_norm));
}
