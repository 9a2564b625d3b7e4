// What packing weights in few bits does many times with each of them: errors of uneven values for a scale that is tried,
// rounding one input of a group after the other, and second moments of activations. Registered through PyTorch's stable
// C ABI, as int8_linear.cpp says.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define INLINE inline __attribute__((always_inline))

// Keeps the compiler from making one operation of a product and the sum that follows: torch rounds both.
#if defined(__x86_64__)
#define UNKNOWN(value) asm volatile("" : "+x"(value))
#else
#define UNKNOWN(value) asm volatile("" : "+w"(value))
#endif

constexpr int64_t kMostValues = 16, kMostInputs = 128;
constexpr float kEvenLeast = -8, kEvenLargest = 7;

// What numbers stand for in ascending order; none are the evenly spaced ones. A value is the first one and the steps
// up to it: whole numbers, whose sums are exact.
struct Values {
  int64_t count = 0;
  float value[kMostValues], step[kMostValues], between[kMostValues];
};

struct Groups {
  const float* weight;  // [groups, size]
  const float* scale;   // [groups]
  Values values;
  int64_t size;
  void* found;  // like weight: squared errors as floats, or numbers as bytes
};

// Of a group of inputs, all [size, outputs] unless it is said. Without `before`, `given` are weights, and coupling is of
// the inverse's factor; with it, `given` is what a weight is pulled by, and coupling the moment.
struct InOrder {
  const float* before;
  const float* given;
  const float* scale;     // [outputs]
  const float* coupling;  // [size, size]; right of the diagonal is what a change does to later inputs
  Values values;
  int64_t size, outputs;
  float* found;
};

namespace portable {
constexpr int kLanes = 4;
#include "few_bits.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8;
#include "few_bits.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
constexpr int kLanes = 16;
#include "few_bits.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#include "moments.h"
#pragma GCC pop_options
#endif

// The numbers are the operators' `instruction_set` argument; few_bits.py has the same table.
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3 };

bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (instruction_set == kAvx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  return false;
}

bool has_moments() {
#if defined(__x86_64__)
  return cpu_has(kAvx512) && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

int64_t best_instruction_set() {
  static const int64_t best = cpu_has(kAvx512) ? kAvx512 : cpu_has(kAvx2) ? kAvx2 : kPortable;
  return best;
}

int64_t known(int64_t instruction_set) {
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  STD_TORCH_CHECK(cpu_has(instruction_set), "few_bits: this CPU lacks instruction set ", instruction_set);
  return instruction_set;
}

#if defined(__x86_64__)
#define FOR_SET(set, function) \
  (set == kAvx512 ? avx512::function : set == kAvx2 ? avx2::function : portable::function)
#else
#define FOR_SET(set, function) (portable::function)
#endif

const float* floats(const Tensor& tensor, int64_t numbers, const char* name) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float && tensor.is_contiguous() && tensor.numel() == numbers,
                  "few_bits: ", name, " must be ", numbers, " contiguous float32 numbers");
  return static_cast<const float*>(tensor.const_data_ptr());
}

Values values_of(const Tensor& values) {
  Values found;
  found.count = values.numel();
  STD_TORCH_CHECK(found.count > 1 && found.count <= kMostValues, "few_bits: there must be 2 to 16 values");
  const float* value = floats(values, found.count, "values");
  for (int64_t at = 0; at < found.count; ++at) {
    found.value[at] = value[at];
    found.step[at] = at == 0 ? 0 : value[at] - value[at - 1];
    found.between[at] = at == 0 ? 0 : (value[at] + value[at - 1]) / 2;
  }
  return found;
}

constexpr int64_t kGrain = int64_t{1} << 14;  // weights for which waking a thread pays

using OverGroups = void (*)(const Groups&, int64_t, int64_t);

Tensor over_groups(const Tensor& weight, const Tensor& scale, const Tensor& values, OverGroups run, ScalarType type) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) > 0, "few_bits: weights must be [groups, size]");
  const int64_t count = weight.size(0), size = weight.size(1);
  Tensor found = torch::stable::new_empty(weight, {count, size}, type);
  const Groups groups{floats(weight, count * size, "weights"), floats(scale, count, "scales"), values_of(values), size,
                      found.mutable_data_ptr()};
  torch::stable::parallel_for(0, count, 1 + kGrain / size,
                              [&](int64_t first, int64_t last) { run(groups, first, last); });
  return found;
}

Tensor uneven_errors(const Tensor& weight, const Tensor& scale, const Tensor& values, int64_t instruction_set) {
  const int64_t set = known(instruction_set);
  return over_groups(weight, scale, values, FOR_SET(set, squared_errors), ScalarType::Float);
}

Tensor uneven_numbers(const Tensor& weight, const Tensor& scale, const Tensor& values, int64_t instruction_set) {
  const int64_t set = known(instruction_set);
  return over_groups(weight, scale, values, FOR_SET(set, numbers), ScalarType::Byte);
}

Tensor in_order(const Tensor& given, const std::optional<Tensor>& before, const Tensor& scale, const Tensor& coupling,
                const std::optional<Tensor>& values, int64_t instruction_set) {
  STD_TORCH_CHECK(given.dim() == 2 && given.size(0) <= kMostInputs, "few_bits: a group has at most 128 inputs");
  const int64_t set = known(instruction_set), size = given.size(0), outputs = given.size(1);
  Tensor found = torch::stable::new_empty(given, {size, outputs}, ScalarType::Float);
  const InOrder order{before ? floats(*before, size * outputs, "numbers") : nullptr,
                      floats(given, size * outputs, "weights"),
                      floats(scale, outputs, "scales"),
                      floats(coupling, size * size, "couplings"),
                      values ? values_of(*values) : Values{},
                      size,
                      outputs,
                      static_cast<float*>(found.mutable_data_ptr())};
  const auto run = FOR_SET(set, in_order);
  const int64_t strip = FOR_SET(set, kStrip), strips = (outputs + strip - 1) / strip;
  torch::stable::parallel_for(0, strips, 1 + kGrain / (strip * (size + 1)),
                              [&](int64_t first, int64_t last) { run(order, first, last); });
  return found;
}

// Adds xT x to a moment on and right of the diagonal, by whole squares of kSide.
void add_moment(Tensor moment, const Tensor& x) {
  STD_TORCH_CHECK(has_moments(), "few_bits: this CPU has no products of bfloat16");
  STD_TORCH_CHECK(x.dim() == 2 && x.scalar_type() == ScalarType::BFloat16 && x.is_contiguous(),
                  "few_bits: activations must be contiguous bfloat16 [tokens, inputs]");
#if defined(__x86_64__)
  const int64_t tokens = x.size(0), size = x.size(1);
  floats(moment, size * size, "moments");
  const int64_t sides = (size + kSide - 1) / kSide, pairs = (tokens + 1) / 2;
  std::vector<uint32_t> packed(sides * pairs * kSide);
  const uint16_t* from = static_cast<const uint16_t*>(x.const_data_ptr());
  float* to = static_cast<float*>(moment.mutable_data_ptr());
  torch::stable::parallel_for(0, sides, 1, [&](int64_t first, int64_t last) {
    for (int64_t side = first; side < last; ++side) pack_side(from, tokens, size, side, packed.data());
  });
  torch::stable::parallel_for(0, sides * (sides + 1) / 2, 1, [&](int64_t first, int64_t last) {
    for (int64_t square = first; square < last; ++square) add_square(packed.data(), pairs, size, square, to);
  });
#endif
}

}  // namespace

extern "C" int64_t optigpu_best_few_bits_instruction_set() { return best_instruction_set(); }
extern "C" int64_t optigpu_few_bits_has_moments() { return has_moments(); }

STABLE_TORCH_LIBRARY_FRAGMENT(optigpu, library) {
  library.def("uneven_errors(Tensor weight, Tensor scale, Tensor values, int instruction_set=0) -> Tensor");
  library.def("uneven_numbers(Tensor weight, Tensor scale, Tensor values, int instruction_set=0) -> Tensor");
  library.def("in_order(Tensor given, Tensor? before, Tensor scale, Tensor coupling, Tensor? values, "
              "int instruction_set=0) -> Tensor");
  library.def("add_moment(Tensor(a!) moment, Tensor x) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(optigpu, CPU, library) {
  library.impl("uneven_errors", TORCH_BOX(&uneven_errors));
  library.impl("uneven_numbers", TORCH_BOX(&uneven_numbers));
  library.impl("in_order", TORCH_BOX(&in_order));
  library.impl("add_moment", TORCH_BOX(&add_moment));
}
