// The uneven values of numbers of 4 and 3 bits (four_bits/table.py) with 128 added.

#pragma once

#include <cstdint>

alignas(16) constexpr uint8_t kUnevenValues[16] = {1, 34, 55, 71, 85, 98, 110, 122, 134, 146, 158, 171, 185, 200, 218, 240};
alignas(16) constexpr uint8_t kUnevenThrees[16] = {1, 52, 85, 112, 137, 163, 193, 233};
