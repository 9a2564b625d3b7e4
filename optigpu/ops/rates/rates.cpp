// How fast this machine's processor reads, copies and multiplies when nothing else is in the way: no operator that is
// launched, no threads that wait for each other after each of them. Plain C functions, which rates.py calls by ctypes.
//
// Each runs on threads that begin together, and returns the seconds from the first one's begin to the last one's end.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

enum Product : int64_t {
  kFloat32Portable = 0,
  kFloat32Avx2 = 1,
  kFloat32Avx512 = 2,
  kBfloat16Avx512 = 3,
  kInt8Avx2 = 4,
  kInt8Avx512 = 5,
};
enum Way : int64_t { kPlain = 0, kOther = 1 };  // of reading: without and with prefetches; of copying: loops and memcpy

constexpr int64_t kCacheLine = 64, kAheadBytes = 2048;
constexpr int64_t kSlice = 1024;  // a thread's part of an array is a multiple of this many bytes
constexpr int kOperandBytes = 128;  // of numbers to multiply; sums begin at different bytes of them

#define INLINE inline __attribute__((always_inline))

// What the compiler knows nothing about from here on, and so must have computed.
#if defined(__x86_64__)
#define UNKNOWN(value) asm volatile("" : "+v"(value))
#else
#define UNKNOWN(value) asm volatile("" : "+w"(value))
#endif

namespace portable {
#if defined(__aarch64__)
constexpr int kLanes = 4, kSums = 24;
#else
constexpr int kLanes = 4, kSums = 12;
#endif
#include "rates_kernel.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8, kSums = 12;
#include "rates_kernel.h"
struct Int8 {  // sums of 16 bits, which may overflow: it is their speed that counts
  typedef int16_t Sum __attribute__((vector_size(32)));
  typedef __m256i Operand;
  static constexpr int64_t kOperations = 2 * 32;
  static INLINE void add(Sum& sum, Operand a, Operand b) { sum += (Sum)_mm256_maddubs_epi16(a, b); }
};
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
constexpr int kLanes = 16, kSums = 24;
#include "rates_kernel.h"
}  // namespace avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
namespace avx512_vnni {
constexpr int kLanes = 16, kSums = 24;
#include "rates_kernel.h"
struct Int8 {
  typedef __m512i Sum;
  typedef __m512i Operand;
  static constexpr int64_t kOperations = 2 * 64;
  static INLINE void add(Sum& sum, Operand a, Operand b) { sum = _mm512_dpbusd_epi32(sum, a, b); }
};
}  // namespace avx512_vnni
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace avx512_bf16 {
constexpr int kLanes = 16, kSums = 24;
#include "rates_kernel.h"
struct Bfloat16 {
  typedef __m512 Sum;
  typedef __m512bh Operand;
  static constexpr int64_t kOperations = 2 * 32;
  static INLINE void add(Sum& sum, Operand a, Operand b) { sum = _mm512_dpbf16_ps(sum, a, b); }
};
}  // namespace avx512_bf16
#pragma GCC pop_options
#endif

using Multiply = void (*)(const char*, int64_t);
using Read = void (*)(const char*, int64_t, int64_t);
using Copy = void (*)(char*, const char*, int64_t, int64_t);

struct Products {
  Multiply run;        // null where the processor lacks the instructions
  int64_t operations;  // of a round
};

#define PRODUCTS(set, type) {set::multiply<set::type>, set::kSums * set::type::kOperations}

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

Products products_of(int64_t product) {
  if (product == kFloat32Portable) return PRODUCTS(portable, Float32);
#if defined(__x86_64__)
  if (product == kFloat32Avx2 && has_avx2()) return PRODUCTS(avx2, Float32);
  if (product == kInt8Avx2 && has_avx2()) return PRODUCTS(avx2, Int8);
  if (product == kFloat32Avx512 && has_avx512()) return PRODUCTS(avx512, Float32);
  if (product == kInt8Avx512 && has_avx512() && __builtin_cpu_supports("avx512vnni"))
    return PRODUCTS(avx512_vnni, Int8);
  if (product == kBfloat16Avx512 && has_avx512() && __builtin_cpu_supports("avx512bf16"))
    return PRODUCTS(avx512_bf16, Bfloat16);
#endif
  return {nullptr, 0};
}

Read read_of(int64_t way) {
#if defined(__x86_64__)
  if (has_avx512()) return way == kPlain ? avx512::read<false> : avx512::read<true>;
  if (has_avx2()) return way == kPlain ? avx2::read<false> : avx2::read<true>;
#endif
  return way == kPlain ? portable::read<false> : portable::read<true>;
}

void copy_by_library(char* to, const char* from, int64_t bytes, int64_t passes) {
  for (int64_t pass = 0; pass < passes; ++pass) {
    std::memcpy(to, from, bytes);
    asm volatile("" ::: "memory");
  }
}

Copy copy_of(int64_t way) {
  if (way == kOther) return copy_by_library;
#if defined(__x86_64__)
  if (has_avx512()) return avx512::copy;
  if (has_avx2()) return avx2::copy;
#endif
  return portable::copy;
}

using Clock = std::chrono::steady_clock;

// Seconds in which each of `count` threads runs work(its number); negative where they could not be started.
template <typename Work>
double together(int64_t count, const Work& work) {
  std::vector<Clock::time_point> begins(count), ends(count);
  std::atomic<int64_t> missing{count};
  std::atomic<bool> off{false};
  const auto run = [&](int64_t id) {
    for (missing.fetch_sub(1); missing.load() > 0 && !off.load();) std::this_thread::yield();
    if (off.load()) return;
    begins[id] = Clock::now();
    work(id);
    ends[id] = Clock::now();
  };
  std::vector<std::thread> others;
  try {
    for (int64_t id = 1; id < count; ++id) others.emplace_back(run, id);
  } catch (const std::system_error&) {
    off.store(true);
  }
  run(0);
  for (std::thread& other : others) other.join();
  if (off.load()) return -1;
  const auto first = *std::min_element(begins.begin(), begins.end());
  const auto last = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(last - first).count();
}

int64_t begin_of(int64_t bytes, int64_t id, int64_t threads) { return bytes / kSlice * id / threads * kSlice; }

}  // namespace

extern "C" {

// Seconds in which all `bytes` of `data` are read `passes` times, each by the same one of `threads` threads.
double optigpu_rates_read(const char* data, int64_t bytes, int64_t passes, int64_t threads, int64_t way) {
  const Read read = read_of(way);
  return together(threads, [=](int64_t id) {
    const int64_t begin = begin_of(bytes, id, threads);
    read(data + begin, begin_of(bytes, id + 1, threads) - begin, passes);
  });
}

// The same for a copy of `bytes`.
double optigpu_rates_copy(char* to, const char* from, int64_t bytes, int64_t passes, int64_t threads, int64_t way) {
  const Copy copy = copy_of(way);
  return together(threads, [=](int64_t id) {
    const int64_t begin = begin_of(bytes, id, threads);
    copy(to + begin, from + begin, begin_of(bytes, id + 1, threads) - begin, passes);
  });
}

// Seconds in which each thread does `rounds` rounds of products.
double optigpu_rates_multiply(int64_t product, int64_t rounds, int64_t threads) {
  const Multiply multiply = products_of(product).run;
  if (multiply == nullptr) return -1;
  volatile char unknown = 0x3f;  // of which floats of 32 and of 16 bits are about 0.75
  alignas(64) char numbers[kOperandBytes];
  for (char& number : numbers) number = unknown;
  return together(threads, [=, &numbers](int64_t) { multiply(numbers, rounds); });
}

// Operations of a round on one thread; 0 where the processor has no instructions for such products.
int64_t optigpu_rates_operations(int64_t product) { return products_of(product).operations; }
}
