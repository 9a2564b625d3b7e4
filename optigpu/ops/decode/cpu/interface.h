// What the decoder is given and called with: plain structs that interface.py fills by ctypes, field by field in this order.

#pragma once

#include <cstdint>

enum MatrixKind : int64_t { kBfloat16Weights = 0, kFourBits = 1, kEightBits = 2 };
enum NormKind : int64_t { kLayerNorm = 0, kRmsNorm = 1 };
enum ActivationKind : int64_t { kGeluTanh = 0, kGelu = 1, kRelu = 2, kSilu = 3 };
enum CacheKind : int64_t { kBfloat16Cache = 0, kInt8Cache = 1 };
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512Vnni = 3 };

struct Norm {
  int64_t kind;
  const float* weight;  // [width]
  const float* bias;    // [width], or null
  double epsilon;
};

// Weights in blocks of kBlockOutputs outputs, as cpu/packing.py lays them out.
struct Matrix {
  int64_t kind, outputs, inputs;
  int64_t group;            // inputs that share a scale; 0 for bfloat16
  const uint8_t* numbers;   // a block: inputs x 8, 16 or 32 bytes
  const int8_t* scale;      // [blocks, inputs / group, kBlockOutputs], multiples of the output's unit
  const float* bias;        // [blocks, kBlockOutputs], or null
  const uint16_t* unit;     // bfloat16 [blocks, kBlockOutputs]
};

struct Block {
  Norm first;
  const Matrix* qkv;  // one or three
  int64_t qkv_count;
  Matrix output;
  Norm second;
  Matrix gate;  // of no outputs where there is none
  Matrix up;
  Matrix down;
  double scale;
  int64_t window;  // tokens that a token attends to, 0 for all
};

struct Program {
  int64_t width, heads, kv_heads, head_size, inner, vocabulary, context, activation;
  const uint16_t* embedding;  // bfloat16 [vocabulary, width]
  const float* positions;     // [context, width], or null
  const Block* blocks;
  int64_t block_count;
  Norm final;
  Matrix head;
};

// Keys lie in blocks of kKeyBlock tokens, [block][head size][token]; values as [token][padded head size]. One after the
// other: layers, sequences, heads. Scales: float [layers, sequences, heads, stored] of int8 keys and values, else null.
struct Cache {
  int64_t kind, sequences;
  int64_t capacity;  // tokens of a sequence
  int64_t stored;    // room for them, a multiple of kKeyBlock
  void* keys;
  void* values;
  float* key_scales;
  float* value_scales;
  const float* cosines;  // [capacity, head_size / 2], or null
  const float* sines;
};

constexpr int64_t kBlockOutputs = 16;
constexpr int64_t kKeyBlock = 16;
