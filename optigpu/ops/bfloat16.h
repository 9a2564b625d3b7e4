// bfloat16 numbers as their bits: the upper half of a float.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float from_bfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t to_bfloat16(float value) {  // round to nearest, ties to even
  if (value != value) return 0x7fc0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
