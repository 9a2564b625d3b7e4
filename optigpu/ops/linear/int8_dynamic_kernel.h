// The loops of int8_dynamic. int8_dynamic.cpp includes this file once for each instruction set, inside a namespace
// that defines what one register of weights is:
//   kPartOutputs       outputs whose sums one register of 32-bit integers (or of pairs of them) holds
//   kPartsAtOnce       registers of sums for each row that are worked on together
//   kMaxRows           rows that are worked on together
//   Part, Inputs, Sums weights, four activations of one row for all lanes, and sums; registers
//   load_part(), broadcast(), add_products(), store_sums()

// Bytes ahead of the stream: hardware prefetchers stop at each 4 KiB page.
constexpr int kPrefetchBytes = 2048;
constexpr int kCacheLine = 64;
// A product-sum takes 4 or 5 cycles and up to two start per cycle: fewer than 8 independent ones would wait.
constexpr int kIndependentSums = 8;
constexpr int kPartBytes = kPartOutputs * kGroup;

// sums[r][j] = sum over k of x[r, k] * weights[j, k] for kPartsAtOnce parts of a tile; x: rows `inner` apart.
template <int kRows>
void part_sums(const int8_t* x, int64_t inner, const uint8_t* weights, int32_t (*sums)[kTile]) {
  constexpr int kUnroll = (kIndependentSums + kRows * kPartsAtOnce - 1) / (kRows * kPartsAtOnce);
  constexpr int kStep = kTile * kGroup;  // bytes from one group of inputs to the next
  Sums total[kUnroll][kRows][kPartsAtOnce] = {};
  const int64_t groups = inner / kGroup;
  int64_t g = 0;
  for (; g + kUnroll <= groups; g += kUnroll) {
    const uint8_t* step = weights + g * kStep;
#pragma GCC unroll 16
    for (int u = 0; u < kUnroll; ++u) {
#pragma GCC unroll 16
      for (int line = 0; line < kPartsAtOnce * kPartBytes; line += kCacheLine)
        __builtin_prefetch(step + u * kStep + kPrefetchBytes + line);
      Inputs inputs[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) inputs[r] = broadcast(x + r * inner + (g + u) * kGroup);
#pragma GCC unroll 16
      for (int p = 0; p < kPartsAtOnce; ++p) {
        const Part part = load_part(step + u * kStep + p * kPartBytes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) total[u][r][p] = add_products(total[u][r][p], part, inputs[r]);
      }
    }
  }
  for (; g < groups; ++g)
    for (int p = 0; p < kPartsAtOnce; ++p) {
      const Part part = load_part(weights + g * kStep + p * kPartBytes);
      for (int r = 0; r < kRows; ++r)
        total[0][r][p] = add_products(total[0][r][p], part, broadcast(x + r * inner + g * kGroup));
    }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int p = 0; p < kPartsAtOnce; ++p) {
#pragma GCC unroll 16
      for (int u = 1; u < kUnroll; ++u) total[0][r][p] += total[u][r][p];
      store_sums(total[0][r][p], sums[r] + p * kPartOutputs);
    }
}

using PartSums = void (*)(const int8_t*, int64_t, const uint8_t*, int32_t (*)[kTile]);

template <size_t... kIndex>
constexpr std::array<PartSums, sizeof...(kIndex)> part_sums_by_rows(std::index_sequence<kIndex...>) {
  return {part_sums<static_cast<int>(kIndex) + 1>...};
}

// Computes the outputs of the tiles [first, last) for every row of the problem.
void run_tiles(const Problem& problem, int64_t first, int64_t last) {
  static constexpr auto kPartSums = part_sums_by_rows(std::make_index_sequence<kMaxRows>());
  const int64_t blocks = (problem.rows + kMaxRows - 1) / kMaxRows;
  alignas(64) int32_t sums[kMaxRows][kTile];
  for (int64_t tile = first; tile < last; ++tile) {
    const uint8_t* weights = problem.packed + tile * problem.inner * kTile;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = problem.rows * block / blocks, end = problem.rows * (block + 1) / blocks;
      for (int part = 0; part < kTile; part += kPartsAtOnce * kPartOutputs)
        kPartSums[end - begin - 1](problem.x + begin * problem.inner, problem.inner, weights + part * kGroup,
                                   reinterpret_cast<int32_t(*)[kTile]>(&sums[0][part]));
      for (int64_t row = begin; row < end; ++row) store_outputs(problem, sums[row - begin], row, tile * kTile);
    }
  }
}

// q = round(x / scale) with scale = max |x| / 127 for one row of `inner` numbers; q is filled up with zeros to `padded`.
// Returns the scale and the sum of q. A row with NaN or infinity has the scale NaN, so that all of its outputs have it.
Row quantize_row(const float* x, int64_t inner, int64_t padded, int8_t* q) {
  int32_t largest_bits = 0;  // as integers, magnitudes are in order: finite ones, infinity, NaN
  for (int64_t k = 0; k < inner; ++k) {
    int32_t bits;
    std::memcpy(&bits, x + k, sizeof bits);
    largest_bits = std::max(largest_bits, bits & 0x7fffffff);
  }
  std::memset(q, 0, padded);
  if (largest_bits >= 0x7f800000) return {std::numeric_limits<float>::quiet_NaN(), 0};
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  const float scale = largest / kLargest;
  if (scale == 0) return {1, 0};  // zeros, or so small that the scale underflows
  int32_t sum = 0;
  for (int64_t k = 0; k < inner; ++k) {
    const float shifted = x[k] / scale + kRounder;  // rounds to nearest, ties to even
    int32_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    const int32_t rounded = std::min(kLargest, std::max(-kLargest, bits - kRounderBits));
    q[k] = static_cast<int8_t>(rounded);
    sum += rounded;
  }
  return {scale, sum};
}
