// The uneven values of 4-bit numbers (four_bits/table.py) with 128 added.

#pragma once

#include <cstdint>

alignas(16) constexpr uint8_t kUnevenValues[16] = {1, 34, 55, 71, 85, 98, 110, 122, 134, 146, 158, 171, 185, 200, 218, 240};
