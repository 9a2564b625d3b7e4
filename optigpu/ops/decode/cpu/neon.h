// What the instruction sets of ARM have in common. Included once for each; see instruction_sets.h.

constexpr int kLanes = 4, kMaxRows = 8, kFloatRows = 4, kUnrolled = 4;
#include "../../vector_math.h"
typedef uint32_t Unsigned __attribute__((vector_size(kLanes * 4)));
typedef Bits Sums4;
constexpr bool kWideSums = true;

INLINE Bits load_halves(const uint16_t* p) { return (Bits)vmovl_u16(vld1_u16(p)); }

INLINE Bits load_bytes(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof four);
  return (Bits)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
}

INLINE void store_bytes(int8_t* to, Bits numbers) {
  const int16x4_t halves = vmovn_s32((int32x4_t)numbers);
  const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(halves, halves))), 0);
  std::memcpy(to, &four, sizeof four);
}

INLINE Bits widened(Bits sums) { return sums; }

INLINE Bits looked_up(const uint8_t (&table)[16], Bits numbers) {
  return (Bits)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)(numbers & 0x0f0f0f0f));
}
