// The uneven values of numbers of 4 and 3 bits (four_bits/scheme.py), to which kUnevenZero is added.

#pragma once

#include <cstdint>

constexpr int32_t kUnevenZero = 64;
constexpr int32_t kSixteenMove = 3, kEightMove = 7;  // what is added to the values of a group whose scale is odd
alignas(16) constexpr uint8_t kSixteenValues[16] = {0, 17, 27, 35, 42, 49, 55, 61, 67, 73, 79, 86, 93, 100, 109, 120};
alignas(16) constexpr uint8_t kEightValues[16] = {0, 26, 42, 56, 69, 82, 97, 117};
