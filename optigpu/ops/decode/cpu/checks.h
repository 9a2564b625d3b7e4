// What is wrong with a program, a cache or tokens, as a sentence; empty where nothing is.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"

namespace {

std::string wrong_matrix(const Matrix& matrix, int64_t outputs, int64_t inputs, const char* name) {
  if (matrix.outputs != outputs || matrix.inputs != inputs || matrix.numbers == nullptr)
    return std::string(name) + " must be " + std::to_string(outputs) + " x " + std::to_string(inputs) + ", not " +
           std::to_string(matrix.outputs) + " x " + std::to_string(matrix.inputs) + ".";
  const bool whole = matrix.kind == kBfloat16Weights;
  if (matrix.kind < kBfloat16Weights || matrix.kind > kSixBits)
    return std::string(name) + " must be bf16, w3k, w4, w4k, w5, w6 or w8.";
  if (whole ? inputs % 4 != 0 : (matrix.group != 32 && matrix.group != 64 && matrix.group != 128) || inputs % matrix.group)
    return std::string(name) + " needs groups of 32, 64 or 128 that divide its " + std::to_string(inputs) +
           " inputs, not of " + std::to_string(matrix.group) + ".";
  return matrix.finer ? std::string(name) + " cannot have finer rows: only the head and the embedding can." : "";
}

// Of a head or an embedding.
std::string wrong_table(Matrix matrix, int64_t outputs, int64_t inputs, const char* name) {
  const FinerRows* finer = std::exchange(matrix.finer, nullptr);
  std::string wrong = wrong_matrix(matrix, outputs, inputs, name);
  if (finer == nullptr || !wrong.empty()) return wrong;
  wrong = wrong_matrix(finer->matrix, finer->matrix.outputs, inputs, "finer rows");
  if (!wrong.empty()) return wrong;
  bool fit = finer->matrix.kind == matrix.kind && finer->matrix.group == matrix.group;
  for (int64_t i = 0; i < finer->matrix.outputs; ++i)
    fit = fit && finer->rows[i] > (i > 0 ? finer->rows[i - 1] : -1) && finer->rows[i] < outputs;
  return fit ? "" : std::string(name) + " needs finer rows in ascending order, of its own kind and group.";
}

// Of matrices that are multiplied in one product.
std::string too_many_outputs(const Matrix* matrices, int64_t count, const char* name) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) blocks += blocks_of(matrices[i]);
  if (blocks <= Shares::kMostBlocks) return "";
  return std::string(name) + " has " + std::to_string(blocks * kBlockOutputs) +
         " outputs; the CPU decoder takes at most " + std::to_string(Shares::kMostBlocks * kBlockOutputs) + ".";
}

// Of queries or keys, which are `count` numbers.
std::string wrong_head_norm(const Program& program, const HeadNorm& heads, int64_t count) {
  const int64_t size = program.head_size;
  if (heads.together == 0 || heads.together == size || (heads.together == count && !program.by_groups)) return "";
  return "A norm of queries or keys is over " + std::to_string(size) + " numbers or over all that follow each other, not over " +
         std::to_string(heads.together) + ".";
}

std::string wrong_mixture(const Program& program, const Block& block) {
  const Mixture& mixture = *block.mixture;
  const int64_t width = program.width, all = mixture.count + mixture.shared;
  if (mixture.chosen < 1 || mixture.chosen > mixture.count || mixture.router_count < 1 || mixture.router_count > 1 + mixture.shared)
    return "A mixture must choose between one and all of its experts.";
  if (block.second.weight == nullptr || program.parallel) return "A mixture must follow the attention and a norm.";
  std::string wrong = wrong_matrix(mixture.routers[0], mixture.count, width, "router");
  if (mixture.router_count > 1) wrong += wrong_matrix(mixture.routers[1], 1, width, "shared gate");
  const auto is_whole = [&](const Expert& expert) { return expert.up[0].kind == kBfloat16Weights; };
  int64_t blocks = 0;
  for (int64_t i = 0; i < all && wrong.empty(); ++i) {
    const Expert& expert = mixture.experts[i];
    const int64_t inner = expert.down.inputs;
    int64_t outputs = 0;
    for (int64_t j = 0; j < expert.up_count; ++j) {
      wrong += wrong_matrix(expert.up[j], expert.up[j].outputs, width, "an expert's gate and up");
      outputs += expert.up[j].outputs;
      if ((expert.up[j].kind == kBfloat16Weights) != is_whole(mixture.experts[0]))
        return "Experts must be of bf16 all together or none of them.";
    }
    if (outputs != 2 * inner)
      return "An expert's gate and up must have " + std::to_string(2 * inner) + " outputs, not " + std::to_string(outputs) + ".";
    wrong += wrong_matrix(expert.down, width, inner, "an expert's down");
    blocks += (2 * inner + width) / kBlockOutputs + 3;
  }
  if (wrong.empty() && blocks > Shares::kMostBlocks) return "The experts have too many outputs.";
  return wrong;
}

std::string wrong_block(const Program& program, const Block& block) {
  const int64_t width = program.width, heads = program.heads * program.head_size;
  const int64_t shared = program.kv_heads * program.head_size;
  std::string wrong;
  int64_t outputs = 0;
  for (int64_t i = 0; i < block.qkv_count; ++i) {
    wrong += wrong_matrix(block.qkv[i], block.qkv[i].outputs, width, "qkv");
    outputs += block.qkv[i].outputs;
  }
  if (outputs != heads + 2 * shared)
    return "qkv must have " + std::to_string(heads + 2 * shared) + " outputs, not " + std::to_string(outputs) + ".";
  wrong += wrong_head_norm(program, block.query_norm, heads) + wrong_head_norm(program, block.key_norm, shared);
  wrong += wrong_matrix(block.output, width, heads, "output") + too_many_outputs(block.qkv, block.qkv_count, "qkv") +
           too_many_outputs(&block.output, 1, "output");
  if (block.mixture) return wrong + wrong_mixture(program, block);
  if (block.gate.outputs > 0) wrong += wrong_matrix(block.gate, program.inner, width, "gate");
  return wrong + wrong_matrix(block.up, program.inner, width, "up") + wrong_matrix(block.down, width, program.inner, "down") +
         too_many_outputs(&block.up, 1, "up") + too_many_outputs(&block.down, 1, "down");
}

// Activations are quantized once for all matrices that they meet.
bool groups_differ(const Program& program) {
  int64_t known = 0;
  const auto differs = [&](const Matrix& matrix) {
    if (matrix.kind == kBfloat16Weights || matrix.outputs == 0) return false;
    if (known == 0) known = matrix.group;
    return matrix.group != known;
  };
  bool found = differs(program.head);
  for (int64_t i = 0; i < program.block_count; ++i) {
    const Block& block = program.blocks[i];
    for (int64_t j = 0; j < block.qkv_count; ++j) found = differs(block.qkv[j]) || found;
    found = differs(block.output) || found;
    for (int64_t j = 0; block.mixture && j < block.mixture->count + block.mixture->shared; ++j) {
      const Expert& expert = block.mixture->experts[j];
      for (int64_t up = 0; up < expert.up_count; ++up) found = differs(expert.up[up]) || found;
      found = differs(expert.down) || found;
    }
    found = differs(block.gate) || found;
    found = differs(block.up) || found;
    found = differs(block.down) || found;
  }
  return found;
}

std::string wrong_program(const Program& program) {
  if (program.width <= 0 || program.width % 16 != 0 || program.heads <= 0 || program.kv_heads <= 0 ||
      program.heads % program.kv_heads != 0 || program.vocabulary <= 0 || program.inner <= 0 || program.block_count <= 0)
    return "width must be a multiple of 16, heads a multiple of kv_heads, and no size may be 0.";
  if (program.head_size <= 0 || program.head_size % 4 != 0 || program.head_size > kMostHeadSize)
    return "head_size must be a multiple of 4 and at most " + std::to_string(kMostHeadSize) + ", not " +
           std::to_string(program.head_size) + ".";
  if (program.rotary_size < 0 || program.rotary_size % 2 != 0 || program.rotary_size > program.head_size)
    return "rotary_size must be even and at most " + std::to_string(program.head_size) + ", not " +
           std::to_string(program.rotary_size) + ".";
  for (int64_t i = 0; i < program.block_count; ++i) {
    const std::string wrong = wrong_block(program, program.blocks[i]);
    if (!wrong.empty()) return "Block " + std::to_string(i) + ": " + wrong;
  }
  std::string wrong = wrong_table(program.head, program.vocabulary, program.width, "head") +
                      too_many_outputs(&program.head, 1, "head") +
                      wrong_table(program.embedding, program.vocabulary, program.width, "embedding");
  if (program.positions.outputs > 0) wrong += wrong_matrix(program.positions, program.context, program.width, "positions");
  return wrong.empty() && groups_differ(program) ? "All quantized matrices of a program must have the same group size." : wrong;
}

std::string wrong_tokens(const Program& program, const int64_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= program.vocabulary)
      return "Token id " + std::to_string(tokens[i]) + " is out of range: this model's ids are 0 to " +
             std::to_string(program.vocabulary - 1) + ".";
  return "";
}

std::string wrong_cache(const Program& program, const Cache& cache) {
  for (int64_t i = 0; i < program.block_count; ++i)
    if (program.blocks[i].rotary >= cache.tables)
      return "Block " + std::to_string(i) + " needs table " + std::to_string(program.blocks[i].rotary) + " of angles: there are " +
             std::to_string(cache.tables) + ".";
  if (cache.kind != kBfloat16Cache && cache.kind != kInt8Cache && cache.kind != kInt4Cache)
    return "A cache holds bf16, int8 or int4.";
  if (cache.sequences < 1 || cache.capacity < 1 || cache.page < 1 || cache.most * cache.page < cache.capacity)
    return "A cache needs at least one sequence and one token.";
  if (cache.page % kKeyBlock != 0) return "A page holds a multiple of " + std::to_string(kKeyBlock) + " tokens.";
  return "";
}

std::string beyond(const Engine& engine, int64_t position) {
  return "Position " + std::to_string(position) + " is out of range: the cache has room for " + std::to_string(engine.room()) +
         " tokens.";
}

// For sequences of so many tokens each.
std::string missing_pages(const Cache& cache, int64_t total) {
  for (int64_t sequence = 0; sequence < cache.sequences; ++sequence)
    for (int64_t page = 0; page * cache.page < total; ++page) {
      const int64_t found = cache.table[sequence * cache.most + page];
      if (found < 0 || found >= cache.pages)
        return "Sequence " + std::to_string(sequence) + " has no page for its token " + std::to_string(page * cache.page) + ".";
    }
  return "";
}

// Places that a pass cannot write or that no page has.
std::string wrong_rows(const Engine& engine, const Rows& rows) {
  const Cache& cache = engine.cache();
  std::vector<bool> seen(cache.sequences);
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t sequence = rows.sequence[row], position = rows.position[row];
    if (sequence < 0 || sequence >= cache.sequences)
      return "The cache has no sequence " + std::to_string(sequence) + ": it has " + std::to_string(cache.sequences) + ".";
    if (position < 0 || position >= engine.room()) return beyond(engine, position);
    const bool follows = row > 0 && rows.sequence[row - 1] == sequence;
    if (follows ? position != rows.position[row - 1] + 1 : seen[sequence])
      return "The tokens of sequence " + std::to_string(sequence) + " must follow each other.";
    seen[sequence] = true;
    const int64_t page = cache.table[sequence * cache.most + position / cache.page];
    if (page < 0 || page >= cache.pages)
      return "Sequence " + std::to_string(sequence) + " has no page for its token " + std::to_string(position) + ".";
  }
  return "";
}

}  // namespace
