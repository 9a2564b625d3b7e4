// The tile kernel of int8_linear, in GCC vector types. int8_linear.cpp includes this file once for each
// instruction set, inside a namespace that defines kLanes (floats in a vector register) and load_weights().
// So the arithmetic that a machine with AVX2 tests is the same source that a machine with AVX-512 runs.

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));

constexpr int kVectors = kTile / kLanes;
// 12 accumulators + the weights + one broadcast fit the 16 vector registers of AVX2.
constexpr int kMaxRows = 12 / kVectors;
// A fused multiply-add takes 4 cycles and two start per cycle: fewer than 8 independent sums would wait.
constexpr int kIndependentSums = 8;
// Bytes ahead of the stream: without it one core reached 13 GB/s of weights instead of 18 on Zen 3, whose
// hardware prefetcher stops at each 4 KiB page.
constexpr int kPrefetchBytes = 2048;
constexpr int kCacheLine = 64;

// sums[r][j] = sum over k of x[r, k] * weights[k, j]; weights: [inner, kTile], x: rows `inner` apart.
template <int kRows>
void tile_sums(const float* x, const int8_t* weights, int64_t inner, float (*sums)[kTile]) {
  constexpr int kUnroll = (kIndependentSums + kRows * kVectors - 1) / (kRows * kVectors);
  Vector total[kUnroll][kRows][kVectors] = {};
  int64_t k = 0;
  for (; k + kUnroll <= inner; k += kUnroll) {
    const int8_t* step = weights + k * kTile;
#pragma GCC unroll 16
    for (int line = 0; line < kUnroll * kTile; line += kCacheLine)
      __builtin_prefetch(step + kPrefetchBytes + line);
#pragma GCC unroll 16
    for (int u = 0; u < kUnroll; ++u) {
      Vector weight[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) weight[v] = load_weights(step + u * kTile + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) total[u][r][v] += weight[v] * x[r * inner + k + u];
    }
  }
  for (; k < inner; ++k)
    for (int v = 0; v < kVectors; ++v) {
      const Vector weight = load_weights(weights + k * kTile + v * kLanes);
      for (int r = 0; r < kRows; ++r) total[0][r][v] += weight * x[r * inner + k];
    }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
      for (int u = 1; u < kUnroll; ++u) total[0][r][v] += total[u][r][v];
      std::memcpy(&sums[r][v * kLanes], &total[0][r][v], sizeof(Vector));
    }
}

using TileSums = void (*)(const float*, const int8_t*, int64_t, float (*)[kTile]);

template <size_t... kIndex>
constexpr std::array<TileSums, sizeof...(kIndex)> tile_sums_by_rows(std::index_sequence<kIndex...>) {
  return {tile_sums<static_cast<int>(kIndex) + 1>...};
}

// Computes the outputs of the tiles [first, last) for every row of the problem.
void run_tiles(const Problem& problem, int64_t first, int64_t last) {
  static constexpr auto kTileSums = tile_sums_by_rows(std::make_index_sequence<kMaxRows>());
  const int64_t blocks = (problem.rows + kMaxRows - 1) / kMaxRows;
  alignas(64) float sums[kMaxRows][kTile];
  for (int64_t tile = first; tile < last; ++tile) {
    const int8_t* weights = problem.packed + tile * problem.inner * kTile;
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t begin = problem.rows * block / blocks, end = problem.rows * (block + 1) / blocks;
      kTileSums[end - begin - 1](problem.x + begin * problem.inner, weights, problem.inner, sums);
      for (int64_t row = begin; row < end; ++row) store_outputs(problem, sums[row - begin], row, tile * kTile);
    }
  }
}
