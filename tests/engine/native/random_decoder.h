// Decoders with random weights for programs that are run by a sanitizer, an emulator or a counter of instructions. Each
// includes this file once. The numbers are the same on any processor.

#pragma once

#include "../../../optigpu/ops/decode/cpu/decode.cpp"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <random>

namespace {

std::mt19937_64 numbers;

int64_t pick(int64_t least, int64_t most) { return least + static_cast<int64_t>(numbers() % (most - least + 1)); }

// About normal. The standard library's own numbers differ between processors, as its logarithms do.
float normal(float middle, float spread) {
  int64_t sum = 0;
  for (int i = 0; i < 12; ++i) sum += pick(0, 65535);
  return middle + spread * (static_cast<float>(sum - 6 * 65535) / 65536);
}

// Exactly as large as the decoder may read, so that one byte more is seen.
struct Memory {
  std::vector<std::unique_ptr<uint8_t[]>> pieces;

  uint8_t* bytes(int64_t count) {
    pieces.emplace_back(new uint8_t[count]);
    for (int64_t i = 0; i < count; ++i) pieces.back()[i] = static_cast<uint8_t>(numbers());
    return pieces.back().get();
  }
  float* floats(int64_t count, float middle, float spread) {
    float* found = reinterpret_cast<float*>(bytes(count * 4));
    for (int64_t i = 0; i < count; ++i) found[i] = normal(middle, spread);
    return found;
  }
  uint16_t* bfloat16s(int64_t count, float middle, float spread) {
    uint16_t* found = reinterpret_cast<uint16_t*>(bytes(count * 2));
    for (int64_t i = 0; i < count; ++i) found[i] = to_bfloat16(normal(middle, spread));
    return found;
  }
};

Matrix matrix(Memory& memory, int64_t kind, int64_t outputs, int64_t inputs, int64_t group, bool biased) {
  const int64_t blocks = (outputs + kBlockOutputs - 1) / kBlockOutputs;
  Matrix made{kind, outputs, inputs, kind == kBfloat16Weights ? 0 : group, nullptr, nullptr, nullptr, nullptr, nullptr};
  if (kind == kBfloat16Weights) {
    made.numbers = reinterpret_cast<uint8_t*>(memory.bfloat16s(blocks * inputs * 16, 0, 0.2f));
  } else {
    constexpr int64_t kBits[] = {16, 4, 8, 4, 3, 5, 6};  // by MatrixKind
    made.numbers = memory.bytes(blocks * inputs * 2 * kBits[kind]);
    if (kind == kEightBits)  // -128 is no number that is ever packed
      for (int64_t i = 0; i < blocks * inputs * 16; ++i)
        const_cast<uint8_t*>(made.numbers)[i] = std::max<uint8_t>(made.numbers[i], 1);
    made.scale = reinterpret_cast<int8_t*>(memory.bytes(blocks * (inputs / group) * 16));
    made.unit = memory.bfloat16s(blocks * 16, 0, kind == kFourBits ? 4e-4f : 3e-5f);
  }
  made.bias = biased ? memory.floats(blocks * 16, 0, 0.1f) : nullptr;
  return made;
}

enum class Family { kAny, kGpt2, kLlama };
constexpr int64_t kMixed = kSixBits + 1;  // all kinds

struct Scene {
  Memory memory;
  std::vector<Block> blocks;
  std::deque<std::vector<Matrix>> qkv;  // and those of experts
  std::deque<std::vector<Expert>> all_experts;
  std::deque<Mixture> mixtures;
  std::vector<int64_t> rows;
  FinerRows finer{};
  Program program{};
  Family family = Family::kAny;
  bool rotary = false;
  int64_t tables = 1;

  // Of any shape and kind.
  explicit Scene(int64_t vocabulary = 0) {
    const int64_t group = int64_t{32} << pick(0, 2), kinds = pick(0, kMixed);
    program.width = group * pick(1, 2);
    program.kv_heads = pick(1, 3);
    program.heads = program.kv_heads * pick(1, 2);
    program.head_size = group / (program.heads % 3 == 0 ? 1 : 4 / std::min<int64_t>(4, program.heads));
    while (program.heads * program.head_size % group != 0) program.head_size += 4;
    program.inner = group * pick(1, 3);
    program.vocabulary = vocabulary > 0 ? vocabulary : pick(2, 70);
    program.context = pick(20, 60);
    program.activation = pick(0, 4);
    program.block_count = pick(1, 2);
    fill(group, kinds);
  }

  // The sizes, the context, the activation and the number of blocks are those of `shape`; all weights are of one kind.
  Scene(const Program& shape, Family family, int64_t kind, int64_t group) : program(shape), family(family) { fill(group, kind); }

 private:
  void fill(int64_t group, int64_t kinds) {
    rotary = has(Family::kLlama);
    program.rotary_size = rotary ? program.head_size : 0;
    program.embedding_scale = program.residual_scale = 1;
    if (family == Family::kAny) vary();
    qkv.resize(program.block_count);
    for (int64_t i = 0; i < program.block_count; ++i) blocks.push_back(block(i, group, kinds));
    program.blocks = blocks.data();
    program.final = norm();
    program.head = any(program.vocabulary, program.width, group, kinds);
    if (has(Family::kGpt2)) program.head.finer = refined(program.head);
    program.embedding = has(Family::kGpt2) ? program.head : table(program.vocabulary, group);
    if (!rotary) program.positions = table(program.context, group);
  }

  // Parts that neither of the families has.
  void vary() {
    if (rotary) program.rotary_size = 2 * pick(1, program.head_size / 2);
    if (rotary) tables = pick(1, 2);
    program.neighbours = pick(0, 1);
    program.by_groups = pick(0, 1);
    program.parallel = pick(0, 3) == 0;  // then there is no mixture
    program.embedding_scale = static_cast<double>(pick(1, 3));
    program.residual_scale = 1 / static_cast<double>(pick(1, 3));
    program.score_cap = static_cast<double>(2 * pick(0, 1));
    program.logit_cap = static_cast<double>(3 * pick(0, 1));
  }

  void vary(Block& made, int64_t group, int64_t kinds) {
    const int64_t heads = program.heads * program.head_size, shared = program.kv_heads * program.head_size;
    const bool whole = program.by_groups == 0 && pick(0, 1) == 1;
    if (rotary) made.rotary = pick(0, tables - 1);
    if (pick(0, 1) == 1) made.query_norm = {norm(heads), whole ? heads : program.head_size};
    if (pick(0, 1) == 1) made.key_norm = {norm(shared), whole ? shared : program.head_size};
    if (pick(0, 1) == 1) made.sinks = memory.floats(program.heads, 0, 1);
    if (pick(0, 1) == 1) made.after_attention = norm();
    if (pick(0, 1) == 1) made.after_mlp = norm();
    if (pick(0, 1) == 1) made.first = {};
    if (program.parallel == 0 && pick(0, 1) == 1) made.mixture = mixture(group, kinds);
    if (made.mixture == nullptr && pick(0, 1) == 1) made.second = {};
  }

  const Mixture* mixture(int64_t group, int64_t kinds) {
    const int64_t experts = pick(1, 4), one = kind(kinds), shared = pick(0, 1), ups = pick(1, 2);
    const auto make = [&](int64_t outputs, int64_t inputs) { return matrix(memory, one, outputs, inputs, group, pick(0, 1) == 1); };
    const auto kept = [&](std::vector<Matrix> made) { return qkv.push_back(std::move(made)), qkv.back().data(); };
    Mixture made{};
    std::vector<Expert> its;
    for (int64_t i = 0; i < experts + shared; ++i) {
      const int64_t inner = group * pick(1, 2);
      std::vector<Matrix> up;  // a gate and what it multiplies, as one or as two
      for (int64_t j = 0; j < ups; ++j) up.push_back(make(2 * inner / ups, program.width));
      its.push_back({kept(std::move(up)), ups, make(program.width, inner)});
    }
    all_experts.push_back(std::move(its));
    made.experts = all_experts.back().data();
    made.count = experts;
    made.shared = shared;
    made.chosen = pick(1, experts);
    made.router_count = 1 + (shared == 1 && pick(0, 1) == 1);
    made.routers = kept({make(experts, program.width), make(1, program.width)});
    made.sigmoid = pick(0, 1);
    made.normalized = pick(0, 1);
    made.pairs = ups == 1 && pick(0, 1) == 1;
    made.scale = 1;
    made.alpha = pick(0, 1) == 1 ? 1.7 : 0;
    made.limit = 2;
    if (pick(0, 1) == 1) made.choice_bias = memory.floats(experts, 0, 1);
    mixtures.push_back(made);
    return &mixtures.back();
  }

  // Rows that are only looked up, of any kind or of 8 bits.
  Matrix table(int64_t count, int64_t group) {
    return matrix(memory, family == Family::kAny ? pick(0, 4) : kEightBits, count, program.width, group, false);
  }

  // Some rows, at least one.
  const FinerRows* refined(const Matrix& whole) {
    rows.push_back(pick(0, whole.outputs - 1));
    for (int64_t row = rows[0] + 1; row < whole.outputs; ++row)
      if (pick(0, 2) == 0) rows.push_back(row);
    finer = {rows.data(), matrix(memory, whole.kind, rows.size(), whole.inputs, whole.group, false)};
    return &finer;
  }

  // Whether something is there that only one of the families has.
  bool has(Family only) const { return family == Family::kAny ? pick(0, 1) == 1 : family == only; }

  // Numbers are picked one after the other: compilers order the arguments of a call as they like.
  Matrix any(int64_t outputs, int64_t inputs, int64_t group, int64_t kinds) {
    const int64_t one = kind(kinds);
    const bool biased = has(Family::kGpt2);
    return matrix(memory, one, outputs, inputs, group, biased);
  }

  static int64_t kind(int64_t kinds) { return kinds == kMixed ? pick(0, kMixed - 1) : kinds; }

  Norm norm() { return norm(program.width); }

  Norm norm(int64_t count) {
    const bool layer = has(Family::kGpt2);
    return {layer ? kLayerNorm : kRmsNorm, memory.floats(count, 1, 0.1f), layer ? memory.floats(count, 0, 0.1f) : nullptr, 1e-5};
  }

  Block block(int64_t index, int64_t group, int64_t kinds) {
    const int64_t heads = program.heads * program.head_size, shared = program.kv_heads * program.head_size;
    const auto make = [&](int64_t outputs, int64_t inputs) { return any(outputs, inputs, group, kinds); };
    if (has(Family::kGpt2))
      qkv[index] = {make(heads + 2 * shared, program.width)};
    else
      qkv[index] = {make(heads, program.width), make(shared, program.width), make(shared, program.width)};
    Block made{};
    made.first = norm();
    made.rotary = rotary ? 0 : -1;
    made.qkv = qkv[index].data();
    made.qkv_count = static_cast<int64_t>(qkv[index].size());
    made.output = make(program.width, heads);
    made.second = norm();
    if (has(Family::kLlama)) made.gate = make(program.inner, program.width);
    made.up = make(program.inner, program.width);
    made.down = make(program.width, program.inner);
    made.scale = 1 / std::sqrt(static_cast<double>(program.head_size));
    made.window = family == Family::kAny && pick(0, 1) == 1 ? pick(1, 9) : 0;
    if (family == Family::kAny) vary(made, group, kinds);
    return made;
  }
};

// The cosines and sines of 0, 1, 2, ... times an angle, by products alone.
void turn(float* cosines, float* sines, int64_t stride, int64_t count, double tangent_of_half) {
  const double square = tangent_of_half * tangent_of_half;
  const double c = (1 - square) / (1 + square), s = 2 * tangent_of_half / (1 + square);
  double cosine = 1, sine = 0;
  for (int64_t i = 0; i < count; ++i) {
    cosines[i * stride] = static_cast<float>(cosine);
    sines[i * stride] = static_cast<float>(sine);
    const double next = cosine * c - sine * s;
    sine = sine * c + cosine * s;
    cosine = next;
  }
}

struct CacheMemory {
  std::unique_ptr<uint8_t[]> keys, values;
  std::unique_ptr<float[]> key_scales, value_scales, cosines, sines;
  Cache cache{};

  std::vector<int64_t> table;

  // With `page` 0 each sequence has one page of its own, else `pages` wait to be given to sequences.
  CacheMemory(const Scene& scene, int64_t kind, int64_t sequences, int64_t page = 0, int64_t pages = 0) {
    const Program& program = scene.program;
    cache.kind = kind;
    cache.sequences = sequences;
    cache.capacity = program.context;
    cache.page = page > 0 ? page : (program.context + 15) / 16 * 16;
    cache.most = (program.context + cache.page - 1) / cache.page;
    cache.pages = page > 0 ? pages : sequences;
    table.assign(sequences * cache.most, -1);
    for (int64_t i = 0; page == 0 && i < sequences; ++i) table[i] = i;
    cache.table = table.data();
    const int64_t heads = program.block_count * cache.pages * program.kv_heads, stored = cache.most * cache.page;
    const int64_t size = program.head_size, half_bytes = kind == kBfloat16Cache ? 4 : kind == kInt8Cache ? 2 : 1;
    const int64_t key_numbers = kind == kInt4Cache ? (size + 31) / 32 * 32 : size;
    keys.reset(new uint8_t[heads * cache.page * key_numbers * half_bytes / 2]);
    values.reset(new uint8_t[heads * cache.page * ((size + 15) / 16 * 16) * half_bytes / 2]);
    key_scales.reset(new float[heads * cache.page]);
    value_scales.reset(new float[heads * cache.page]);
    cache.keys = keys.get();
    cache.values = values.get();
    if (kind != kBfloat16Cache) {
      cache.key_scales = key_scales.get();
      cache.value_scales = value_scales.get();
    }
    if (!scene.rotary) return;
    const int64_t half = program.rotary_size / 2, each = stored * half;
    cosines.reset(new float[scene.tables * each]);
    sines.reset(new float[scene.tables * each]);
    for (int64_t table = 0; table < scene.tables; ++table)
      for (int64_t i = 0; i < half; ++i)
        turn(cosines.get() + table * each + i, sines.get() + table * each + i, half, stored, 1 / static_cast<double>(1 + i + table));
    cache.cosines = cosines.get();
    cache.sines = sines.get();
    cache.tables = scene.tables;
    cache.angles = stored;
  }
};

}  // namespace
