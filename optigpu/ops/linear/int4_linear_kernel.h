// The tile kernel of int4_linear, in GCC vector types. int4_linear.cpp includes this file once for each instruction
// set, inside a namespace that defines
//   kLanes: int32 numbers in a vector register, and Ints, a vector of them
//   kMaxRows, kMostSums: how many rows of x, and how many vectors of sums for a digit, fit the registers
//   Partial, add_products(), widen(): sums of products with 4 inputs each, exact for kChunk inputs; kWidePartial where
//     they are int32 and so exact for all
//   load_halves(): kLanes numbers of 16 bits as Ints; by_digit(): the bytes of each four numbers, sorted by their place

typedef float Floats __attribute__((vector_size(kLanes * 4)));

// Bytes ahead of the stream; a hardware prefetcher stops at each 4 KiB page.
constexpr int kPrefetchBytes = 4096;
// Half of the smallest second cache of a CPU with AVX2.
constexpr int64_t kCachedBytes = 1 << 17;

inline Floats load_bfloat16(const uint16_t* p) { return (Floats)(load_halves(p) << 16); }

template <bool kIsBfloat16>
inline Floats load_x(const void* x, int64_t k) {
  if (kIsBfloat16) return load_bfloat16(static_cast<const uint16_t*>(x) + k);
  Floats values;
  std::memcpy(&values, static_cast<const float*>(x) + k, sizeof values);
  return values;
}

// Combines the quarters of a vector of kLanes numbers, lane by lane.
template <typename Combine>
inline Four folded(Ints numbers, Combine combine) {
  Four parts[kLanes / 4];
  std::memcpy(parts, &numbers, sizeof parts);
  for (int i = 1; i < kLanes / 4; ++i) parts[0] = combine(parts[0], parts[i]);
  return parts[0];
}

// Writes a group's activations as digits and returns what the group needs.
template <bool kIsBfloat16>
inline Group group_digits(const void* x, int64_t begin, int64_t size, int8_t* digits) {
  constexpr int32_t kBalance = 0x808080;  // makes the digits unsigned, and back
  Ints largest = {};
  for (int64_t k = 0; k < size; k += kLanes) {
    const Ints magnitude = (Ints)load_x<kIsBfloat16>(x, begin + k) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const Four fours = folded(largest, [](Four a, Four b) { return a > b ? a : b; });
  const Step step = step_for(std::max(std::max(fours[0], fours[1]), std::max(fours[2], fours[3])));
  if (step.value != step.value) {
    std::memset(digits, 0, size * kQuadBytes / 4);
    return {Four{}, step.value, step.value};
  }
  Ints sums[kDigits] = {};
  for (int64_t k = 0; k < size; k += kLanes) {
    const Floats scaled = load_x<kIsBfloat16>(x, begin + k) * step.inverse;
    const Ints whole = __builtin_convertvector(scaled + (scaled < 0 ? Floats{} - 0.5f : Floats{} + 0.5f), Ints);
    const Ints bytes = (whole + kBalance) ^ kBalance;
#pragma GCC unroll 3
    for (int d = 0; d < kDigits; ++d) sums[d] += bytes << (24 - 8 * d) >> 24;
    const Ints ordered = by_digit(bytes);
    std::memcpy(digits + k * (kQuadBytes / 4), &ordered, sizeof ordered);
  }
  const auto plus = [](Four a, Four b) { return a + b; };
  const Four low = folded(sums[0], plus), middle = folded(sums[1], plus), high = folded(sums[2], plus);
  const Four halves[2] = {
      __builtin_shuffle(low, middle, Four{0, 4, 1, 5}) + __builtin_shuffle(low, middle, Four{2, 6, 3, 7}),
      __builtin_shuffle(high, Four{0, 4, 1, 5}) + __builtin_shuffle(high, Four{2, 6, 3, 7})};
  const Four sum = __builtin_shuffle(halves[0], halves[1], Four{0, 1, 4, 5}) +
                   __builtin_shuffle(halves[0], halves[1], Four{2, 3, 6, 7});
  return {-8 * sum, step.value, step.value * (65536.0f * sum[2] + static_cast<float>(256 * sum[1] + sum[0]))};
}

void write_digits(const Problem& problem, int64_t first, int64_t last) {
  const int64_t size = problem.group, groups = problem.inner / size;
  for (int64_t g = first * groups; g < last * groups; ++g) {
    int8_t* digits = problem.digits + g * size * (kQuadBytes / 4);
    problem.groups[g] = problem.is_bfloat16 ? group_digits<true>(problem.x, g * size, size, digits)
                                            : group_digits<false>(problem.x, g * size, size, digits);
  }
}

// How many vectors of outputs share the activations that are read.
constexpr int joint(int rows) { return 2 * rows <= kMostSums ? 2 : 1; }

// Adds the products of kChunk inputs with each digit.
template <int kRows, int kJoint>
inline void add_chunk(const uint8_t* weights, const int8_t* digits, int64_t row_bytes,
                      Partial (&sums)[kRows][kJoint][kDigits]) {
#pragma GCC unroll 1  // more would not fit the registers
  for (int b = 0; b < kChunk / kBlockInputs; ++b) {
    Ints halves[2][kJoint];
#pragma GCC unroll 2
    for (int v = 0; v < kJoint; ++v) {
      Ints block;
      std::memcpy(&block, weights + b * kBlockBytes + v * sizeof block, sizeof block);
      __builtin_prefetch(weights + b * kBlockBytes + v * sizeof block + kPrefetchBytes);
      halves[0][v] = block & 0x0f0f0f0f;
      halves[1][v] = (block >> 4) & 0x0f0f0f0f;
    }
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h)
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 3
        for (int d = 0; d < kDigits; ++d) {
          int32_t x;
          std::memcpy(&x, digits + r * row_bytes + (2 * b + h) * kQuadBytes + d * 4, sizeof x);
#pragma GCC unroll 2
          for (int v = 0; v < kJoint; ++v) sums[r][v][d] = add_products(sums[r][v][d], halves[h][v], x);
        }
  }
}

// totals[r][v][d] = the sum over a group's inputs of (q - 8) * digit d of row r.
template <int kRows, int kJoint>
inline void group_sums(const uint8_t* weights, const int8_t* digits, const Problem& problem, const Group* facts,
                       Ints (&totals)[kRows][kJoint][kDigits]) {
  const int64_t row_bytes = problem.inner * (kQuadBytes / 4), groups = problem.inner / problem.group;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kJoint; ++v)
#pragma GCC unroll 3
      for (int d = 0; d < kDigits; ++d) totals[r][v][d] = Ints{} + facts[r * groups].start[d];
  for (int64_t k = 0; k < problem.group; k += kChunk) {
    if constexpr (kWidePartial) {
      add_chunk<kRows, kJoint>(weights, digits, row_bytes, totals);
    } else {
      Partial sums[kRows][kJoint][kDigits] = {};
      add_chunk<kRows, kJoint>(weights, digits, row_bytes, sums);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kJoint; ++v)
#pragma GCC unroll 3
          for (int d = 0; d < kDigits; ++d) totals[r][v][d] += widen(sums[r][v][d]);
    }
    weights += kChunk / kBlockInputs * kBlockBytes;
    digits += kChunk * (kQuadBytes / 4);
  }
}

// sums[r][j] = row `row + r` of x times output `first + j` of a tile, without the bias.
template <int kRows, int kJoint>
inline void joint_sums(const Problem& problem, int64_t tile, int64_t first, int64_t row, float (*sums)[kTile]) {
  const int64_t groups = problem.inner / problem.group, row_bytes = problem.inner * (kQuadBytes / 4);
  const int64_t group_bytes = problem.group / kBlockInputs * kBlockBytes;
  const uint8_t* weights = problem.packed + tile * groups * group_bytes + first * 4;
  const int8_t* digits = problem.digits + row * row_bytes;
  Floats result[kRows][kJoint] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const Group* facts = problem.groups + row * groups + g;
    Ints totals[kRows][kJoint][kDigits];
    group_sums<kRows, kJoint>(weights + g * group_bytes, digits + g * problem.group * (kQuadBytes / 4), problem, facts, totals);
    const int64_t place = (tile * groups + g) * kTile + first;
#pragma GCC unroll 2
    for (int v = 0; v < kJoint; ++v) {
      const Floats scale = load_bfloat16(problem.scale + place + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Ints(&total)[kDigits] = totals[r][v];
        const Floats high = __builtin_convertvector(total[2], Floats);
        const Floats exact = high * 65536.0f + __builtin_convertvector((total[1] << 8) + total[0], Floats);
        result[r][v] += exact * facts[r * groups].step * scale;
      }
    }
    if (problem.offset) {
#pragma GCC unroll 2
      for (int v = 0; v < kJoint; ++v) {
        const Floats offset = load_bfloat16(problem.offset + place + v * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) result[r][v] += offset * facts[r * groups].sum;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) std::memcpy(sums[r] + first, result[r], sizeof result[r]);
}

template <int kRows>
void tile_sums(const Problem& problem, int64_t tile, int64_t row, float (*sums)[kTile]) {
  for (int64_t first = 0; first < kTile; first += joint(kRows) * kLanes)
    joint_sums<kRows, joint(kRows)>(problem, tile, first, row, sums);
}

using TileSums = void (*)(const Problem&, int64_t, int64_t, float (*)[kTile]);

template <size_t... kIndex>
constexpr std::array<TileSums, sizeof...(kIndex)> tile_sums_by_rows(std::index_sequence<kIndex...>) {
  return {tile_sums<static_cast<int>(kIndex) + 1>...};
}

// Computes the outputs of the tiles [first, last) for every row of the problem. Some tiles, which fit the second cache,
// are used by all rows before the next ones are read.
void run_tiles(const Problem& problem, int64_t first, int64_t last) {
  static constexpr auto kTileSums = tile_sums_by_rows(std::make_index_sequence<kMaxRows>());
  const int64_t blocks = (problem.rows + kMaxRows - 1) / kMaxRows;
  const int64_t at_once = std::max<int64_t>(1, kCachedBytes / (problem.inner / kBlockInputs * kBlockBytes));
  alignas(64) float sums[kMaxRows][kTile];
  for (; first < last; first += at_once)
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t tile = first; tile < std::min(first + at_once, last); ++tile) {
        const int64_t begin = problem.rows * block / blocks, end = problem.rows * (block + 1) / blocks;
        kTileSums[end - begin - 1](problem, tile, begin, sums);
        for (int64_t row = begin; row < end; ++row) store_outputs(problem, sums[row - begin], row, tile * kTile);
      }
}
