// What the engine asks of the kernels, which are compiled once for each instruction set.

#pragma once

#include <cstdint>

#include "interface.h"

constexpr int64_t kHeadsTogether = 4;  // whose scores are in memory at once

// How the numbers of a quantized matrix lie, and their values.
enum class Stored { kThrees, kFours, kUneven, kFives, kSixes, kEights };

constexpr int kFoursZeroBits = 3;
constexpr int32_t kFoursZero = 1 << kFoursZeroBits;  // what is added to 4-bit weights, so that they are stored without a sign

// Rows that a matrix is multiplied with: as floats, and as 8-bit numbers in groups. Numbers lie in tiles of as many rows as an
// instruction set multiplies together, [group][row][numbers of the group], so that a group of a tile is one piece.
struct Activations {
  float* x;       // [rows, inputs]
  int8_t* q;      // [tiles][inputs / group, rows of the tile, group], -127 to 127
  float* step;    // [tiles][inputs / group, rows of the tile]: what a number of the group stands for
  int32_t* less;  // the same: -kFoursZero times the sum of the numbers, by which products with 4-bit weights are too large
};

enum class Finish { kStore, kAdd, kActivate, kGate };

// y = matrices x, finished; the outputs of several matrices follow each other in a row of `out`. kAdd adds `scale` times y.
// kGate takes two matrices of one shape: out = activation(first) * second.
struct LinearTask {
  const Matrix* matrices;
  int64_t count;
  Activations in;
  int64_t rows;
  Finish finish;
  int64_t activation;
  float* out;
  int64_t stride;  // floats of a row of `out`
  float scale = 1;
};

// Attention of a block over rows, each at a position of a sequence whose keys up to there are in the cache.
struct AttentionTask {
  const Program* program;
  const Cache* cache;
  int64_t layer, window;
  float scale;
  const float* cosines;  // [positions, rotary_size / 2], or null where nothing is turned
  const float* sines;
  const float* sinks;    // [heads], or null
  const float* qkv;  // [rows, (heads + 2 kv_heads) head_size]
  float* out;        // [rows, heads head_size]
  const int64_t* sequence;  // of each row
  const int64_t* position;
};

struct Kernels {
  // h = norm(x); false where x is not finite.
  bool (*norm)(const Norm&, const float* x, float* h, int64_t width);
  // The same in place, of any number of numbers.
  bool (*norm_some)(const Norm&, float* x, int64_t count);
  // Row `row` of `rows`; false where x is not finite.
  bool (*quantize)(const float* x, int64_t inputs, int64_t group, int64_t row, int64_t rows, const Activations& to);
  // The blocks [first, last) of all matrices' blocks.
  void (*linear)(const LinearTask&, int64_t first, int64_t last);
  // inner = what an expert of `count` inner numbers has before its last matrix, of the outputs of the ones before.
  void (*gate)(const Mixture&, int64_t activation, const float* up, float* inner, int64_t count);
  // Puts a head's key and value of a row into the cache.
  void (*append)(const AttentionTask&, int64_t row, int64_t kv_head);
  // The attention of a row's heads from `head` on, which share their keys; `scores` has room for kHeadsTogether times the
  // cache's pages of a sequence.
  void (*attend)(const AttentionTask&, int64_t row, int64_t head, int64_t heads, float* scores);
  // x = embedding of the token + position
  void (*embed)(const Program&, int64_t token, int64_t position, float* x);
  // x = cap * tanh(x / cap)
  void (*cap)(float* x, int64_t count, float cap);
  // Index of the first of the largest in [0, count).
  int64_t (*largest)(const float* x, int64_t count);
  // The index at which the running sum of softmax(x / temperature) passes `point`, from 0 to 1.
  int64_t (*drawn)(const float* x, int64_t count, float temperature, double point, float* scratch);
};

// Where a head's numbers begin in a row of queries, keys and values.
inline int64_t query_at(const Program& program, int64_t head) {
  const int64_t group = program.heads / program.kv_heads;
  return (program.by_groups ? head / group * (group + 2) + head % group : head) * program.head_size;
}
inline int64_t key_at(const Program& program, int64_t kv_head) {
  const int64_t group = program.heads / program.kv_heads;
  return (program.by_groups ? kv_head * (group + 2) + group : program.heads + kv_head) * program.head_size;
}
inline int64_t value_at(const Program& program, int64_t kv_head) {
  return key_at(program, kv_head) + (program.by_groups ? 1 : program.kv_heads) * program.head_size;
}

inline int64_t blocks_of(const Matrix& matrix) { return (matrix.outputs + kBlockOutputs - 1) / kBlockOutputs; }
