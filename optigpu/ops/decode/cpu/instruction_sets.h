// The kernels, compiled once for each instruction set: rows.h, linear.h and attention.h inside a namespace that defines
//   kLanes: numbers of 32 bits in a register; kMaxRows, kFloatRows: rows whose sums of integers, or of floats, fit the registers
//   Sums4, add_products4(), widened(): sums of products of 4-bit weights with 4 activations each, exact for kChunk inputs;
//     kWideSums where they are int32 and so exact for a whole group
//   add_products8(): adds products of 8-bit weights, which are stored with 128 added; kEightsZero is what it leaves of that
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
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "../../bfloat16.h"
#include "tasks.h"

constexpr int64_t kMostHeadSize = 512;

#if defined(__x86_64__)
#define OPAQUE(value) asm("" : "+v"(value))
#else
#define OPAQUE(value) asm("" : "+w"(value))
#endif

#define INLINE inline __attribute__((always_inline))

namespace portable {
constexpr int kLanes = 4, kMaxRows = 4, kFloatRows = 2;
#include "../../vector_math.h"
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef int16_t Sums4 __attribute__((vector_size(kLanes * 4)));
constexpr bool kWideSums = false;
constexpr int32_t kEightsZero = 0;
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
#include "rows.h"
#include "linear.h"
#include "attention.h"
}  // namespace portable

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
constexpr int kLanes = 8, kMaxRows = 4, kFloatRows = 2;
#include "../../vector_math.h"
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef int16_t Sums4 __attribute__((vector_size(kLanes * 4)));
constexpr bool kWideSums = false;
constexpr int32_t kEightsZero = 0;
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
#include "rows.h"
#include "linear.h"
#include "attention.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512vnni")
namespace avx512_vnni {
constexpr int kLanes = 16, kMaxRows = 8, kFloatRows = 4;
#include "../../vector_math.h"
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef Bits Sums4;
constexpr bool kWideSums = true;
constexpr int32_t kEightsZero = 128;
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
#include "rows.h"
#include "linear.h"
#include "attention.h"
}  // namespace avx512_vnni
#pragma GCC pop_options
#endif

inline bool cpu_has(int64_t instruction_set) {
  if (instruction_set == kPortable) return true;
#if defined(__x86_64__)
  if (instruction_set == kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (instruction_set == kAvx512Vnni)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#endif
  return false;
}

inline int64_t best_instruction_set() {
  return cpu_has(kAvx512Vnni) ? kAvx512Vnni : cpu_has(kAvx2) ? kAvx2 : kPortable;
}

#define KERNELS(name) \
  { name::norm, name::quantize, name::linear, name::append, name::attend, name::embed, name::largest, name::drawn }

inline Kernels kernels_for(int64_t instruction_set) {
#if defined(__x86_64__)
  if (instruction_set == kAvx512Vnni) return KERNELS(avx512_vnni);
  if (instruction_set == kAvx2) return KERNELS(avx2);
#endif
  return KERNELS(portable);
}
