// The kernels, compiled once for each instruction set: rows.h, linear.h, tables.h and attention.h inside a namespace that
// defines
//   kLanes: numbers of 32 bits in a register; kMaxRows, kFloatRows: rows whose sums of integers, or of floats, fit the registers
//   kUnrolled: steps of a loop over a group's inputs that are written out. The portable kernels have one each: they are for CPUs that
//     few have, and written out they would be half of what is compiled, for about the same speed
//   Sums4, add_products4(), widened(): sums of products of 4-bit weights with 4 activations each, exact for kChunk inputs, and
//     of 7-bit weights for 4 inputs, of 6-bit ones for 8; kWideSums where they are int32 and so exact for a whole group
//   add_products8(): adds products of 8-bit weights, which are stored with 128 added; kEightsZero is what it leaves of that
//   looked_up(): the entries of a table at the lower halves of bytes, of which none is above 127
//   Pairs: products of two rows at a time, where there are instructions for them, else void
//   load_halves(), load_bytes(), store_bytes(): kLanes numbers of 16 or 8 bits as int32 and back; GCC's own conversions
//     of whole registers take several instructions
//   OPAQUE(): what the compiler may not join with what follows

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

#include "../../bfloat16.h"
#include "tasks.h"
#include "uneven.h"

constexpr int64_t kMostHeadSize = 512;

#if defined(__x86_64__)
#define OPAQUE(value) asm("" : "+v"(value))
#else
#define OPAQUE(value) asm("" : "+w"(value))
#endif

#define INLINE inline __attribute__((always_inline))

namespace portable {
constexpr int kLanes = 4, kMaxRows = 4, kFloatRows = 2, kUnrolled = 1;
#include "../../vector_math.h"
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef int16_t Sums4 __attribute__((vector_size(kLanes * 4)));
constexpr bool kWideSums = false;
constexpr int32_t kEightsZero = 0;
using Pairs = void;
INLINE Bits load_halves(const uint16_t* p) { return Bits{p[0], p[1], p[2], p[3]}; }
INLINE Bits load_bytes(const int8_t* p) { return Bits{p[0], p[1], p[2], p[3]}; }
INLINE void store_bytes(int8_t* to, Bits numbers) {
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(numbers[i]);
}
// The bytes of weights and activations that stand in the lower and in the upper halves of pairs.
INLINE Sums4 add_products4(Sums4 sums, Bits weights, int32_t x) {
  const Sums4 w = (Sums4)weights, a = (Sums4)(Bits{} + x);
  return sums + (w & 0xff) * (a << 8 >> 8) + (w >> 8) * (a >> 8);
}
INLINE Bits widened(Sums4 sums) { return ((Bits)sums << 16 >> 16) + ((Bits)sums >> 16); }
INLINE Bits add_products8(Bits sums, Bits weights, int32_t x) {
  const Sums4 w = (Sums4)(weights ^ static_cast<int32_t>(0x80808080)), a = (Sums4)(Bits{} + x);
  return sums + widened((w << 8 >> 8) * (a << 8 >> 8) + (w >> 8) * (a >> 8));
}
INLINE Bits looked_up(const uint8_t (&table)[16], Bits numbers) {
  uint8_t bytes[sizeof numbers];
  std::memcpy(bytes, &numbers, sizeof numbers);
  for (uint8_t& byte : bytes) byte = table[byte & 15];
  std::memcpy(&numbers, bytes, sizeof numbers);
  return numbers;
}
#include "rows.h"
#include "linear.h"
#include "tables.h"
#include "attention.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8, kMaxRows = 4, kFloatRows = 2, kUnrolled = 4;
#include "../../vector_math.h"
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef int16_t Sums4 __attribute__((vector_size(kLanes * 4)));
constexpr bool kWideSums = false;
constexpr int32_t kEightsZero = 0;
using Pairs = void;
INLINE Bits load_halves(const uint16_t* p) {
  return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE Bits load_bytes(const int8_t* p) {
  return (Bits)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
INLINE void store_bytes(int8_t* to, Bits numbers) {
  const __m256i pairs = _mm256_packs_epi32((__m256i)numbers, (__m256i)numbers);  // in each half of the register
  const __m256i bytes = _mm256_packs_epi16(pairs, pairs);
  const int32_t first = _mm256_extract_epi32(bytes, 0), second = _mm256_extract_epi32(bytes, 4);
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + 4, &second, sizeof second);
}
INLINE Sums4 add_products4(Sums4 sums, Bits weights, int32_t x) {
  return sums + (Sums4)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(x));
}
INLINE Bits widened(Sums4 sums) { return (Bits)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
INLINE Bits add_products8(Bits sums, Bits weights, int32_t x) {
  const __m256i w = (__m256i)(weights ^ static_cast<int32_t>(0x80808080));
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(_mm256_set1_epi32(x), w));
  return sums + widened((Sums4)pairs);
}
INLINE Bits looked_up(const uint8_t (&table)[16], Bits numbers) {
  const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Bits)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)numbers);
}
#include "rows.h"
#include "linear.h"
#include "tables.h"
#include "attention.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")
namespace avx512_vnni {
constexpr int kLanes = 16, kMaxRows = 8, kFloatRows = 4, kUnrolled = 4;
#include "../../vector_math.h"
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef Bits Sums4;
constexpr bool kWideSums = true;
constexpr int32_t kEightsZero = 128;
using Pairs = void;
INLINE Bits load_halves(const uint16_t* p) {
  return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE Bits load_bytes(const int8_t* p) {
  return (Bits)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
INLINE void store_bytes(int8_t* to, Bits numbers) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)numbers));
}
INLINE Bits add_products4(Bits sums, Bits weights, int32_t x) {
  return (Bits)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(x));
}
INLINE Bits widened(Bits sums) { return sums; }
INLINE Bits add_products8(Bits sums, Bits weights, int32_t x) { return add_products4(sums, weights, x); }
INLINE Bits looked_up(const uint8_t (&table)[16], Bits numbers) {
  const __m128i values = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (Bits)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)numbers);
}
#include "rows.h"
#include "linear.h"
#include "tables.h"
#include "attention.h"
}  // namespace avx512_vnni
#pragma GCC pop_options
#endif

#if defined(__aarch64__)
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
namespace arm_dot {
#include "neon.h"
constexpr int32_t kEightsZero = 0;
using Pairs = void;
INLINE Bits add_products4(Bits sums, Bits weights, int32_t x) {
  return (Bits)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(x)));
}
INLINE Bits add_products8(Bits sums, Bits weights, int32_t x) {
  return add_products4(sums, weights ^ static_cast<int32_t>(0x80808080), x);
}
#include "rows.h"
#include "linear.h"
#include "tables.h"
#include "attention.h"
}  // namespace arm_dot
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
namespace arm_i8mm {
#include "neon.h"
constexpr int32_t kEightsZero = 128;
INLINE Bits add_products4(Bits sums, Bits weights, int32_t x) {
  return (Bits)vusdotq_s32((int32x4_t)sums, (uint8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(x)));
}
INLINE Bits add_products8(Bits sums, Bits weights, int32_t x) { return add_products4(sums, weights, x); }
// 8 inputs of 2 outputs in each register, made of 4 inputs and the next 4 of 4 outputs. A product of such a register with
// 8 activations of 2 rows adds 2 x 2 sums: {first output of both rows, second output of both rows}.
struct Pairs {
  uint8x16_t front, back;
  INLINE Pairs(Bits first, Bits second)
      : front((uint8x16_t)vzip1q_s32((int32x4_t)first, (int32x4_t)second)),
        back((uint8x16_t)vzip2q_s32((int32x4_t)first, (int32x4_t)second)) {}
  INLINE void add_products(Bits (&sums)[2], const int8_t* row, const int8_t* next_row) const {
    const int8x16_t x = vcombine_s8(vld1_s8(row), vld1_s8(next_row));
    sums[0] = (Bits)vusmmlaq_s32((int32x4_t)sums[0], front, x);
    sums[1] = (Bits)vusmmlaq_s32((int32x4_t)sums[1], back, x);
  }
  static INLINE Bits of_row(const Bits (&sums)[2]) {
    return (Bits)vuzp1q_s32((int32x4_t)sums[0], (int32x4_t)sums[1]);
  }
  static INLINE Bits of_next_row(const Bits (&sums)[2]) {
    return (Bits)vuzp2q_s32((int32x4_t)sums[0], (int32x4_t)sums[1]);
  }
};
#include "rows.h"
#include "linear.h"
#include "tables.h"
#include "attention.h"
}  // namespace arm_i8mm
#pragma GCC pop_options
#endif

inline bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (instruction_set == kAvx512Vnni)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
  const bool dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
  if (instruction_set == kArmDot) return dot;
  if (instruction_set == kArmI8mm) return dot && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0;
#endif
  return false;
}

inline int64_t best_instruction_set() {
  for (int64_t instruction_set : {kAvx512Vnni, kAvx2, kArmI8mm, kArmDot})
    if (cpu_has(instruction_set)) return instruction_set;
  return kPortable;
}

#define KERNELS(name) \
  { name::norm,   name::norm_some, name::quantize, name::linear, name::gate,    name::append, \
    name::attend, name::embed,     name::cap,      name::largest, name::drawn }

inline Kernels kernels_for(int64_t instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == kAvx512Vnni) return KERNELS(avx512_vnni);
  if (instruction_set == kAvx2) return KERNELS(avx2);
#elif defined(__aarch64__)
  if (instruction_set == kArmI8mm) return KERNELS(arm_i8mm);
  if (instruction_set == kArmDot) return KERNELS(arm_dot);
#endif
  return KERNELS(portable);
}
