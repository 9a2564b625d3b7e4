// Rounding weights to few bits, with compensation or without. Registered through PyTorch's stable C ABI, as
// int8_linear.cpp says.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#define INLINE inline __attribute__((always_inline))

constexpr int64_t kMostValues = 16, kMostInputs = 128, kUnit = 4;
constexpr float kLargestScale = 127;

// What numbers stand for in ascending order; none are the evenly spaced ones. A value is the first one and the steps
// up to it: whole numbers, whose sums are exact.
struct Values {
  int64_t count = 0;
  float value[kMostValues], step[kMostValues], between[kMostValues];
};

struct Compensated {
  const float* weight;  // [outputs, inputs]
  const float* unit;    // [outputs], of which scales are multiples
  // Both [inputs, inputs], bfloat16 if `has_halves`, else float32; the factor is the lower one of the moment's upper R.
  // Null where each group is rounded by itself.
  const void *moment, *factor;
  const float* own;      // [groups, size, size]: the moments of each group's inputs
  const float* inverse;  // [groups, size, size]: the inverses of the upper factor's squares on the diagonal
  Values values;
  float least;          // of evenly spaced values
  float move;           // what is added to uneven values where a scale is an odd multiple of the unit
  const float* shares;  // [tried]: scales of uneven values, in units of the largest weight
  int64_t tried, steps, rounds;  // steps: of the search for scales of even values; rounds: of improvement
  int64_t size, inputs, outputs;
  bool has_halves;
  uint8_t* numbers;  // [outputs, inputs]
  int8_t* scale;     // [outputs, groups]
};

namespace portable {
constexpr int kLanes = 4;
#include "few_bits.h"
#include "compensated.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8;
#include "few_bits.h"
#include "compensated.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
constexpr int kLanes = 16;
#include "few_bits.h"
#include "compensated.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
#define HAS_HALVES
namespace avx512_bf16 {
constexpr int kLanes = 16;
#include "few_bits.h"
#include "compensated.h"
}  // namespace avx512_bf16
#pragma GCC pop_options
#endif

// The numbers are the operators' `instruction_set` argument; few_bits.py has the same table.
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512 = 3, kAvx512Bf16 = 4 };

bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (instruction_set == kAvx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (instruction_set == kAvx512Bf16) return cpu_has(kAvx512) && __builtin_cpu_supports("avx512bf16");
#endif
  return false;
}

int64_t best_instruction_set() {
  static const int64_t best = cpu_has(kAvx512Bf16) ? kAvx512Bf16
                              : cpu_has(kAvx512)   ? kAvx512
                              : cpu_has(kAvx2)     ? kAvx2
                                                   : kPortable;
  return best;
}

int64_t known(int64_t instruction_set) {
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  STD_TORCH_CHECK(cpu_has(instruction_set), "few_bits: this CPU lacks instruction set ", instruction_set);
  return instruction_set;
}

#if defined(__x86_64__)
#define FOR_SET(set, name)                        \
  (set == kAvx512Bf16 ? avx512_bf16::name         \
   : set == kAvx512   ? avx512::name              \
   : set == kAvx2     ? avx2::name                \
                      : portable::name)
#else
#define FOR_SET(set, name) (portable::name)
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

// Of [inputs, inputs], whose type says how errors are multiplied with it.
const void* square(const Tensor& tensor, const Compensated& all, const char* name) {
  if (!all.has_halves) return floats(tensor, all.inputs * all.inputs, name);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::BFloat16 && tensor.is_contiguous() &&
                      tensor.numel() == all.inputs * all.inputs,
                  "few_bits: ", name, " must be contiguous bfloat16 [inputs, inputs]");
  return tensor.const_data_ptr();
}

template <typename Number>
Number* room_for(Tensor& tensor, int64_t numbers, ScalarType type) {
  STD_TORCH_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == numbers,
                  "few_bits: what is found must be ", numbers, " contiguous bytes");
  return static_cast<Number*>(tensor.mutable_data_ptr());
}

void round_groups(const Tensor& weight, const Tensor& unit, const std::optional<Tensor>& moment,
                  const std::optional<Tensor>& factor, const std::optional<Tensor>& own,
                  const std::optional<Tensor>& inverse, int64_t size, const std::optional<Tensor>& values, int64_t move,
                  int64_t least, const Tensor& shares, int64_t steps, int64_t rounds, Tensor numbers, Tensor scale,
                  int64_t instruction_set) {
  STD_TORCH_CHECK(weight.dim() == 2, "few_bits: weights must be [outputs, inputs]");
  const int64_t set = known(instruction_set);
  Compensated all{};
  all.size = size, all.outputs = weight.size(0), all.inputs = weight.size(1);
  STD_TORCH_CHECK(size > 0 && size % kUnit == 0 && size <= kMostInputs && all.inputs % size == 0,
                  "few_bits: a group has 4 to 128 inputs, in fours, and groups divide the inputs");
  all.weight = floats(weight, all.outputs * all.inputs, "weights"), all.unit = floats(unit, all.outputs, "units");
  if (moment) {
    STD_TORCH_CHECK(factor && own && inverse, "few_bits: a moment needs its factor, own moments and inverses");
    all.has_halves = moment->scalar_type() == ScalarType::BFloat16;
    STD_TORCH_CHECK(!all.has_halves || set == kAvx512Bf16, "few_bits: this CPU has no products of bfloat16");
    all.moment = square(*moment, all, "moments"), all.factor = square(*factor, all, "factors");
    all.own = floats(*own, all.inputs * size, "own moments");
    all.inverse = floats(*inverse, all.inputs * size, "inverses");
  }
  if (values) all.values = values_of(*values);
  all.move = static_cast<float>(move), all.least = static_cast<float>(least);
  all.tried = shares.numel(), all.shares = floats(shares, all.tried, "shares"), all.steps = steps, all.rounds = rounds;
  all.numbers = room_for<uint8_t>(numbers, all.outputs * all.inputs, ScalarType::Byte);
  all.scale = room_for<int8_t>(scale, all.outputs * (all.inputs / size), ScalarType::Char);
  const auto run = FOR_SET(set, compensated);
  const int64_t outputs = FOR_SET(set, kStrip), strips = (all.outputs + outputs - 1) / outputs;
  const int64_t line = 64 / sizeof(float);
  std::atomic<int64_t> next{0};  // a thread that others disturb takes fewer strips
  torch::stable::parallel_for(0, strips, 1, [&](int64_t, int64_t) {
    const std::unique_ptr<float[]> room(new float[outputs * (3 * all.inputs + all.inputs / size + 1) + line]);
    float* aligned = room.get() + (-(reinterpret_cast<uintptr_t>(room.get()) / sizeof(float)) % line);
    for (int64_t strip; (strip = next++) < strips;) run(all, strip * outputs, aligned);
  });
}

}  // namespace

extern "C" int64_t optigpu_best_few_bits_instruction_set() { return best_instruction_set(); }
extern "C" int64_t optigpu_few_bits_has_bfloat16() { return cpu_has(kAvx512Bf16); }

STABLE_TORCH_LIBRARY_FRAGMENT(optigpu, library) {
  library.def("round_groups(Tensor weight, Tensor unit, Tensor? moment, Tensor? factor, Tensor? own, Tensor? inverse, "
              "int size, Tensor? values, int move, int least, Tensor shares, int steps, int rounds, Tensor(a!) numbers, "
              "Tensor(b!) scale, int instruction_set=0) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(optigpu, CPU, library) {
  library.impl("round_groups", TORCH_BOX(&round_groups));
}
