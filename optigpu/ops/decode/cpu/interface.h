// What the decoder is given and called with: plain structs that interface.py fills by ctypes, field by field in this order.

#pragma once

#include <cstdint>

enum MatrixKind : int64_t { kBfloat16Weights = 0, kFourBits = 1, kEightBits = 2, kUnevenFourBits = 3, kUnevenThreeBits = 4 };
enum NormKind : int64_t { kLayerNorm = 0, kRmsNorm = 1 };
enum ActivationKind : int64_t { kGeluTanh = 0, kGelu = 1, kRelu = 2, kSilu = 3 };
enum CacheKind : int64_t { kBfloat16Cache = 0, kInt8Cache = 1, kInt4Cache = 2 };
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512Vnni = 3, kArmDot = 4, kArmI8mm = 5 };

struct Norm {
  int64_t kind;
  const float* weight;  // [width]
  const float* bias;    // [width], or null
  double epsilon;
};

struct FinerRows;

// Weights in blocks of kBlockOutputs outputs, as cpu/packing.py lays them out.
struct Matrix {
  int64_t kind, outputs, inputs;
  int64_t group;            // inputs that share a scale; 0 for bfloat16
  const uint8_t* numbers;   // a block: inputs x 8, 16 or 32 bytes
  const int8_t* scale;      // [blocks, inputs / group, kBlockOutputs], multiples of the output's unit
  const float* bias;        // [blocks, kBlockOutputs], or null
  const uint16_t* unit;     // bfloat16 [blocks, kBlockOutputs]
  const FinerRows* finer;   // or null, as everywhere but in a head and an embedding
};

// What is added to some rows of a matrix.
struct FinerRows {
  const int64_t* rows;  // ascending
  Matrix matrix;        // as many outputs
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
  Matrix embedding;  // [vocabulary, width]; the head itself where they are tied
  Matrix positions;  // [context, width], of no outputs where there are none
  const Block* blocks;
  int64_t block_count;
  Norm final;
  Matrix head;
};

// Tokens lie in pages: a sequence's first ones in its first page, and so on. One after the other: layers, heads, pages, so that
// what is read of a head follows each other where a sequence's pages do. Within a page keys are in blocks of kKeyBlock tokens,
// [block][head size][token], and values are [token][padded head size]; int4 ones lie as attention_fours.h says.
// Scales: float [layers, heads, pages, page] of keys and values that are int8 or int4, else null.
struct Cache {
  int64_t kind, sequences;
  int64_t capacity;      // tokens of a sequence
  int64_t page;          // tokens of a page, a multiple of kKeyBlock
  int64_t pages;         // of all sequences together
  int64_t most;          // pages of a sequence
  const int64_t* table;  // [sequences, most]: each sequence's pages, -1 for one that it does not have
  void* keys;
  void* values;
  float* key_scales;
  float* value_scales;
  const float* cosines;  // [capacity, head_size / 2], or null
  const float* sines;
};

constexpr int64_t kBlockOutputs = 16;
constexpr int64_t kKeyBlock = 16;

// Greedy or drawn decoding of all sequences of a cache at once, which are equally long.
struct Request {
  const int64_t* tokens;   // [sequences, count], or null for one of each: that which the last call chose
  int64_t count;
  int64_t steps;           // further tokens of each sequence, 0 for none
  float temperature;
  uint64_t seed;
  int64_t* chosen;         // [sequences, steps], `stride` from row to row
  int64_t stride;
  float* logits;           // [sequences, vocabulary], of the last step
};

// One pass over tokens of any sequences, each at a place of its own. Those of a sequence follow each other; what it has before
// the first of them is in the cache.
struct Rows {
  int64_t count;
  const int64_t* tokens;
  const int64_t* sequence;
  const int64_t* position;
  const uint8_t* wanted;  // whether the next token is asked for
  int64_t* chosen;        // the most likely next tokens, of those that are wanted
  float* logits;          // [wanted, vocabulary]
};

// Greedy decoding of the cache's first sequence with guesses. What is chosen follows in `text`.
struct Guessing {
  int64_t* text;           // room for known + most
  int64_t known;           // tokens so far; all but the last are in the cache
  int64_t least, most;     // how many tokens are enough for a call, and how many there may be
  float* logits;           // [lookahead + 1, vocabulary]
  int64_t chosen, passes, guessed, right;  // what came of it
};
