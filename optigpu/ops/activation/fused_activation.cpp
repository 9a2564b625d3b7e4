// bias + GELU, and bias + SwiGLU, each in one pass over its input, for CPUs. Computes in float32 whatever is stored.
// An activation of one generated token fits the cache, so what one pass saves is the operators that it replaces.
//
// Registered through PyTorch's stable C ABI, as int8_linear.cpp is and for the same reasons.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Bfloat16 : uint16_t {};
enum Float16 : uint16_t {};
enum class Type { kNone, kFloat, kBfloat16, kFloat16 };
enum class Operation { kGeluErf, kGeluTanh, kSwiglu };

constexpr int64_t kBlock = 512;    // outputs of a row that are computed together
constexpr int64_t kGrain = 32768;  // outputs of a thread: waking one costs about as much as so many

// x + -0 is x, whatever its sign.
const auto kNoBias = [] {
  std::array<float, kBlock> zeros;
  zeros.fill(-0.0f);
  return zeros;
}();

struct Problem {
  const void* x;     // [rows, outputs], or [rows, 2 * outputs] for SwiGLU: the gates, then the others
  const void* bias;  // as many as x has columns, or null
  void* y;           // [rows, outputs] of x's type
  Type bias_type;
  int64_t outputs;
};

using Run = void (*)(const Problem&, int64_t, int64_t);

namespace portable {
constexpr int kLanes = 4;
#include "fused_activation.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8;
#include "fused_activation.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
constexpr int kLanes = 16;
#include "fused_activation.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

// The numbers are the operators' `instruction_set` argument; fused_activation.py has the same table.
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

bool cpu_has(int64_t instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (instruction_set == kAvx512) return __builtin_cpu_supports("avx512f");
#endif
  return instruction_set == kPortable;
}

int64_t best_instruction_set() {
  static const int64_t best = cpu_has(kAvx512) ? kAvx512 : cpu_has(kAvx2) ? kAvx2 : kPortable;
  return best;
}

Run run_for(int64_t instruction_set, Operation operation, Type type) {
#if defined(__x86_64__)
  if (instruction_set == kAvx512) return avx512::run_of(operation, type);
  if (instruction_set == kAvx2) return avx2::run_of(operation, type);
#endif
  return portable::run_of(operation, type);
}

Type type_of(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  return type == ScalarType::Float      ? Type::kFloat
         : type == ScalarType::BFloat16 ? Type::kBfloat16
         : type == ScalarType::Half     ? Type::kFloat16
                                        : Type::kNone;
}

Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

void check(const Tensor& x, const std::optional<Tensor>& bias, Operation operation) {
  STD_TORCH_CHECK(x.dim() >= 1 && type_of(x) != Type::kNone,
                  "fused activation: x must be float32, bfloat16 or float16 with at least one dimension");
  const int64_t columns = x.size(-1);
  STD_TORCH_CHECK(operation != Operation::kSwiglu || columns % 2 == 0,
                  "fused activation: the last dimension must be even: gate and up");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == columns && type_of(*bias) != Type::kNone),
                  "fused activation: bias must be a floating-point vector as long as x's last dimension");
}

Tensor apply(const Tensor& x_any, const std::optional<Tensor>& bias_any, Operation operation,
             int64_t instruction_set) {
  check(x_any, bias_any, operation);
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  STD_TORCH_CHECK(cpu_has(instruction_set), "fused activation: this CPU lacks instruction set ", instruction_set);
  const Tensor x = dense(x_any);
  const std::optional<Tensor> bias = bias_any ? std::optional<Tensor>(dense(*bias_any)) : std::nullopt;
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  if (operation == Operation::kSwiglu) shape.back() /= 2;
  Tensor y = torch::stable::new_empty(x, shape);
  if (y.numel() == 0) return y;
  const int64_t outputs = shape.back(), rows = y.numel() / outputs;
  const Problem problem{x.const_data_ptr(),
                        bias ? bias->const_data_ptr() : nullptr,
                        y.mutable_data_ptr(),
                        bias ? type_of(*bias) : Type::kNone,
                        outputs};
  const Run run = run_for(instruction_set, operation, type_of(x));
  const int64_t blocks = (outputs + kBlock - 1) / kBlock;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::min(kBlock, outputs));
  torch::stable::parallel_for(0, rows * blocks, grain,
                              [&](int64_t first, int64_t last) { run(problem, first, last); });
  return y;
}

Tensor bias_gelu(const Tensor& x, std::optional<Tensor> bias, bool tanh, int64_t instruction_set) {
  return apply(x, bias, tanh ? Operation::kGeluTanh : Operation::kGeluErf, instruction_set);
}

Tensor swiglu(const Tensor& x, std::optional<Tensor> bias, int64_t instruction_set) {
  return apply(x, bias, Operation::kSwiglu, instruction_set);
}

}  // namespace

extern "C" int64_t optigpu_best_activation_instruction_set() { return best_instruction_set(); }

STABLE_TORCH_LIBRARY_FRAGMENT(optigpu, library) {
  library.def("bias_gelu(Tensor x, Tensor? bias, bool tanh, int instruction_set=0) -> Tensor");
  library.def("swiglu(Tensor x, Tensor? bias, int instruction_set=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(optigpu, CPU, library) {
  library.impl("bias_gelu", TORCH_BOX(&bias_gelu));
  library.impl("swiglu", TORCH_BOX(&swiglu));
}
