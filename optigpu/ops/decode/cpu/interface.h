// What the decoder is given and called with: plain structs that interface.py fills by ctypes, field by field in this order.

#pragma once

#include <cstdint>

enum MatrixKind : int64_t {
  kBfloat16Weights = 0,
  kFourBits = 1,
  kEightBits = 2,
  kUnevenFourBits = 3,
  kUnevenThreeBits = 4,
  kFiveBits = 5,
  kSixBits = 6
};
enum NormKind : int64_t { kLayerNorm = 0, kRmsNorm = 1 };
enum ActivationKind : int64_t { kGeluTanh = 0, kGelu = 1, kRelu = 2, kSilu = 3, kReluSquared = 4 };
enum CacheKind : int64_t { kBfloat16Cache = 0, kInt8Cache = 1, kInt4Cache = 2 };
enum InstructionSet : int64_t { kBest = 0, kPortable = 1, kAvx2 = 2, kAvx512Vnni = 3, kArmDot = 4, kArmI8mm = 5 };

struct Norm {
  int64_t kind;
  const float* weight;  // [width]; null where there is no norm
  const float* bias;    // [width], or null
  double epsilon;
};

// Of queries or keys, before they are turned: `together` of them at once, which are a head's or all of a token's.
struct HeadNorm {
  Norm norm;  // of all heads: [heads * head_size]
  int64_t together;
};

struct FinerRows;

// Weights in blocks of kBlockOutputs outputs, as cpu/packing.py lays them out.
struct Matrix {
  int64_t kind, outputs, inputs;
  int64_t group;            // inputs that share a scale; 0 for bfloat16
  const uint8_t* numbers;   // a block: inputs x 6, 8, 10, 12, 16 or 32 bytes
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

struct Expert {
  const Matrix* up;  // of a gate and of what it multiplies, or one of both
  int64_t up_count;
  Matrix down;
};

// Experts of which each row has those that a router chooses, and one more that each row has where there is one.
struct Mixture {
  const Expert* experts;  // those that are chosen among, then the shared one
  int64_t count;          // of those that are chosen among
  int64_t shared;         // 0 or 1
  int64_t chosen;
  const Matrix* routers;  // the router's, then that of the shared expert's gate where there is one
  int64_t router_count;
  int64_t sigmoid;        // scores are sigmoids instead of a softmax
  int64_t normalized;     // scores of the chosen ones are made to sum to 1
  int64_t pairs;          // gate and up are neighbouring outputs instead of halves
  double scale;
  double alpha, limit;      // of gate * sigmoid(alpha * gate) * (up + 1), both clamped; alpha 0 for activation(gate) * up
  const float* choice_bias;  // [count], or null
};

// Norms that a block does not have are without weights.
struct Block {
  Norm first;
  const Matrix* qkv;
  int64_t qkv_count;
  HeadNorm query_norm;
  HeadNorm key_norm;
  int64_t rotary;      // the cache's table of angles, -1 where nothing is turned
  const float* sinks;  // [heads], or null: what every row has beside its scores, without a value
  Matrix output;
  Norm after_attention;
  Norm second;
  Matrix gate;  // of no outputs where there is none
  Matrix up;
  Matrix down;
  Norm after_mlp;
  const Mixture* mixture;  // in the place of gate, up and down, or null
  double scale;
  int64_t window;  // tokens that a token attends to, 0 for all
};

struct Program {
  int64_t width, heads, kv_heads, head_size, inner, vocabulary, context, activation;
  int64_t rotary_size;  // numbers of a head that are turned, its first ones
  int64_t neighbours;   // whether numbers 2 i and 2 i + 1 are turned together, instead of i and i + rotary_size / 2
  int64_t by_groups;    // whether queries, keys and values follow each other within each group of heads
  int64_t parallel;     // whether attention and MLP have the same inputs
  double embedding_scale, residual_scale;
  double score_cap, logit_cap;  // what cap * tanh(x / cap) keeps x within, 0 for none
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
  const float* cosines;  // [tables, angles, rotary_size / 2], or null
  const float* sines;
  int64_t tables, angles;  // how many, and the positions of each, at least the capacity
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
