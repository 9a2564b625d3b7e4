// Attention over the cache. Included once for each instruction set; see instruction_sets.h.
//
// Heads of a group share their keys and values: they go through them together, as many at a time as have their sums in
// registers, first through all keys and then through all values. A head's results do not depend on the others beside it.

// Where a head of a page of a sequence lies in the cache, counted in heads.
INLINE int64_t head_index(const AttentionTask& task, int64_t sequence, int64_t page, int64_t kv_head) {
  const Cache& cache = *task.cache;
  return (task.layer * task.program->kv_heads + kv_head) * cache.pages + cache.table[sequence * cache.most + page];
}

INLINE int64_t padded_head(const Program& program) { return (program.head_size + 15) / 16 * 16; }

// Where a token's key and value go: its place in the cache, counted in tokens of a head, and in its block.
struct Place {
  int64_t token, lane;
  int64_t block() const { return token - lane; }
};

// to = from, its pairs turned by the position's angles.
void turned(const AttentionTask& task, const float* from, int64_t position, float* to) {
  const int64_t size = task.program->head_size, half = task.program->rotary_size / 2;
  const int64_t whole = task.cosines == nullptr ? 0 : 2 * half;
  std::memcpy(to + whole, from + whole, (size - whole) * sizeof(float));
  if (whole == 0) return;
  const float* c = task.cosines + position * half;
  const float* s = task.sines + position * half;
  if (task.program->neighbours) {
    for (int64_t i = 0; i < half; ++i) {
      to[2 * i] = from[2 * i] * c[i] - from[2 * i + 1] * s[i];
      to[2 * i + 1] = from[2 * i + 1] * c[i] + from[2 * i] * s[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    to[i] = from[i] * c[i] - from[i + half] * s[i];
    to[i + half] = from[i + half] * c[i] + from[i] * s[i];
  }
}

constexpr int64_t kQueryRoom = kMostHeadSize + 4;
constexpr int64_t kSectionBlocks = 4, kSection = kSectionBlocks * kKeyBlock;
constexpr int64_t kAhead = 2 * kSection;  // tokens between what is read and what is prefetched

// Some blocks of tokens that lie together in one page.
struct Section {
  const uint8_t* keys;
  const uint8_t* values;
  const float* key_scales;  // null where there are none
  const float* value_scales;
  int64_t start, blocks;  // `start`: the position of the first token
};

// What a row attends to in a head: the tokens [begin, end), section by section.
struct Span {
  const AttentionTask& task;
  int64_t sequence, kv_head, begin, end;
  int64_t key_bytes, value_bytes;  // of a token

  Span(const AttentionTask& task, int64_t row, int64_t kv_head, int64_t key_bytes, int64_t value_bytes)
      : task(task), sequence(task.sequence[row]), kv_head(kv_head), end(task.position[row] + 1),
        begin(task.window > 0 ? std::max<int64_t>(0, task.position[row] + 1 - task.window) : 0),
        key_bytes(key_bytes), value_bytes(value_bytes) {}

  int64_t first() const { return begin / kKeyBlock * kKeyBlock; }
  int64_t last() const { return (end - 1) / kKeyBlock * kKeyBlock; }

  // From the block at `place` on, which is one of the span's.
  Section at(int64_t place) const {
    const Cache& cache = *task.cache;
    const int64_t page = place / cache.page, within = place % cache.page;
    const int64_t token = head_index(task, sequence, page, kv_head) * cache.page + within;
    const bool scaled = cache.kind != kBfloat16Cache;
    const int64_t left = std::min(cache.page - within, last() + kKeyBlock - place);
    return {static_cast<const uint8_t*>(cache.keys) + token * key_bytes,
            static_cast<const uint8_t*>(cache.values) + token * value_bytes,
            scaled ? cache.key_scales + token : nullptr,
            scaled ? cache.value_scales + token : nullptr,
            place,
            std::min(left / kKeyBlock, kSectionBlocks)};
  }

  // Calls what(section, ahead): a hardware prefetcher follows no head from page to page, so that `ahead` is to be prefetched.
  template <typename Do>
  INLINE void each(const Do& what) const {
    for (int64_t place = first(); place < end;) {
      const Section section = at(place);
      what(section, at(std::min(place + kAhead, last())));
      place += section.blocks * kKeyBlock;
    }
  }
};

// Into the second cache: what a section takes at once is more than can be on its way into the first.
INLINE void prefetch(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const uint8_t*>(from) + i, 0, 2);
}

// The scores of tokens outside of a span become -infinity; gives the largest of each lane.
INLINE Vector masked(const Span& span, const Section& section, float* scores) {
  const int64_t count = section.blocks * kKeyBlock, begin = span.begin - section.start, end = span.end - section.start;
  for (int64_t t = 0; t < begin; ++t) scores[t] = -std::numeric_limits<float>::infinity();
  for (int64_t t = end; t < count; ++t) scores[t] = -std::numeric_limits<float>::infinity();
  Vector most = load_floats(scores);
  for (int64_t t = kLanes; t < count; t += kLanes) {
    const Vector value = load_floats(scores + t);
    most = value > most ? value : most;
  }
  return most;
}

#include "attention_floats.h"
#include "attention_fours.h"

// Heads that share their keys and values, from `head` on.
template <template <int> class Heads, int kHeads>
void attend_together(const AttentionTask& task, int64_t row, int64_t head, float* scores) {
  const Program& program = *task.program;
  const int64_t size = program.head_size, position = task.position[row], stride = task.cache->most * task.cache->page;
  alignas(64) float queries[kHeads][kQueryRoom] = {}, out[kHeads][kMostHeadSize] = {};
  const float* row_qkv = task.qkv + row * (program.heads + 2 * program.kv_heads) * size;
  for (int h = 0; h < kHeads; ++h) turned(task, row_qkv + query_at(program, head + h), position, queries[h]);
  Heads<kHeads> heads(program, queries, task.scale * kLog2E);
  const Span span(task, row, head / (program.heads / program.kv_heads), heads.key_bytes(), heads.value_bytes());
  Vector most[kHeads], sums[kHeads] = {};
  for (Vector& each : most) each = filled(-std::numeric_limits<float>::infinity());
  const float limit = static_cast<float>(program.score_cap) * kLog2E;
  span.each([&](const Section& section, const Section& ahead) {
    heads.score(section, ahead, scores + section.start, stride);
    for (int h = 0; h < kHeads; ++h) {
      if (limit > 0) cap(scores + h * stride + section.start, section.blocks * kKeyBlock, limit);
      const Vector value = masked(span, section, scores + h * stride + section.start);
      most[h] = value > most[h] ? value : most[h];
    }
  });
  float top[kHeads];
  for (int h = 0; h < kHeads; ++h) top[h] = largest_of(most[h]);
  float sinks[kHeads] = {};
  for (int h = 0; task.sinks && h < kHeads; ++h) {
    sinks[h] = task.sinks[head + h] * kLog2E;
    top[h] = std::max(top[h], sinks[h]);
  }
  span.each([&](const Section& section, const Section& ahead) {
    heads.weigh(span, section, ahead, scores + section.start, stride, top, sums, out);
  });
  for (int h = 0; h < kHeads; ++h) {
    const float inverse = 1 / (sum_of(sums[h]) + (task.sinks ? power_of_two(filled(sinks[h] - top[h]))[0] : 0));
    float* to = task.out + (row * program.heads + head + h) * size;
    heads.finish(out[h]);
    for (int64_t i = 0; i < size; ++i) to[i] = out[h][i] * inverse;
  }
}

void append(const AttentionTask& task, int64_t row, int64_t kv_head) {
  const Program& program = *task.program;
  const Cache& cache = *task.cache;
  const int64_t size = program.head_size, position = task.position[row];
  const int64_t head = head_index(task, task.sequence[row], position / cache.page, kv_head);
  const Place place{head * cache.page + position % cache.page, position % kKeyBlock};
  const float* row_qkv = task.qkv + row * (program.heads + 2 * program.kv_heads) * size;
  alignas(64) float key[kMostHeadSize], value[kMostHeadSize];
  turned(task, row_qkv + key_at(program, kv_head), position, key);
  std::memcpy(value, row_qkv + value_at(program, kv_head), size * sizeof(float));
  if (cache.kind == kInt4Cache) return append_fours(program, cache, place, key, value);
  if (cache.kind == kInt8Cache) return append_eights(program, cache, place, key, value);
  append_bfloat16s(program, cache, place, key, value);
}

// As many heads at a time as have their sums in registers.
template <template <int> class Heads, int kHeads>
void attend_with(const AttentionTask& task, int64_t row, int64_t head, int64_t heads, float* scores) {
  for (; heads >= kHeads; head += kHeads, heads -= kHeads) attend_together<Heads, kHeads>(task, row, head, scores);
  if constexpr (kHeads > 1) attend_with<Heads, kHeads / 2>(task, row, head, heads, scores);
}

void attend(const AttentionTask& task, int64_t row, int64_t head, int64_t heads, float* scores) {
  static_assert(kFloatRows <= kHeadsTogether);
  if (task.cache->kind == kInt4Cache) return attend_with<Fours, kFloatRows>(task, row, head, heads, scores);
  if (task.cache->kind == kInt8Cache) return attend_with<Eights, kFloatRows>(task, row, head, heads, scores);
  attend_with<Bfloat16s, kFloatRows>(task, row, head, heads, scores);
}
