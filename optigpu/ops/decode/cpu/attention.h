// Attention over the cache. Included once for each instruction set; see instruction_sets.h.

INLINE Vector load_numbers(const uint16_t* from) { return load_bfloat16(from); }

INLINE Vector load_numbers(const int8_t* from) { return __builtin_convertvector(load_bytes(from), Vector); }

// Where a head of a page of a sequence lies in the cache, counted in heads.
INLINE int64_t head_index(const AttentionTask& task, int64_t sequence, int64_t page, int64_t kv_head) {
  const Cache& cache = *task.cache;
  return (task.layer * cache.pages + cache.table[sequence * cache.most + page]) * task.program->kv_heads + kv_head;
}

INLINE int64_t padded_head(const Program& program) { return (program.head_size + 15) / 16 * 16; }

// to = from, its pairs (i, i + half) turned by the position's angles.
void turned(const AttentionTask& task, const float* from, int64_t position, float* to) {
  const int64_t size = task.program->head_size, half = size / 2;
  if (task.cache->cosines == nullptr) {
    std::memcpy(to, from, size * sizeof(float));
    return;
  }
  const float* c = task.cache->cosines + position * half;
  const float* s = task.cache->sines + position * half;
  for (int64_t i = 0; i < half; ++i) {
    to[i] = from[i] * c[i] - from[i + half] * s[i];
    to[i + half] = from[i + half] * c[i] + from[i] * s[i];
  }
}

// The scale of a head's int8 numbers, and those.
inline float to_int8(const float* x, int64_t size, int8_t* q) {
  float most = 0;
  for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(x[i]));
  const float inverse = most > 0x1p-120f ? 127 / most : 0;
  for (int64_t i = 0; i < size; ++i) q[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
  return inverse == 0 ? 0 : most / 127;
}

constexpr int64_t kQueryRoom = kMostHeadSize + 4;

// Of heads that share their keys: scores[h][t] of the blocks of keys from `first` to `last`, before anything is masked.
template <int kHeads, typename Stored>
INLINE void score_keys(const float (*queries)[kQueryRoom], const Stored* keys, const float* key_scales, float scale,
                       int64_t size, int64_t first, int64_t last, float* scores, int64_t stride) {
  constexpr int kChains = 4 / kParts > 0 ? 4 / kParts : 1;
  for (int64_t block = first; block <= last; ++block) {
    const Stored* from = keys + block * kKeyBlock * size;
    Vector sums[kHeads][kParts][kChains] = {};
    for (int64_t i = 0; i < size; i += kChains)
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          const Vector numbers = load_numbers(from + (i + c) * kKeyBlock + part * kLanes);
#pragma GCC unroll 4
          for (int h = 0; h < kHeads; ++h) sums[h][part][c] += numbers * queries[h][i + c];
        }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        Vector sum = sums[h][part][0];
#pragma GCC unroll 4
        for (int c = 1; c < kChains; ++c) sum += sums[h][part][c];
        const int64_t place = block * kKeyBlock + part * kLanes;
        sum *= scale;
        store_floats(scores + h * stride + place, key_scales ? sum * load_floats(key_scales + place) : sum);
      }
  }
}

// Turns the scores of [begin, end) into weights that sum to 1; those of their blocks outside of it become 0.
INLINE void softmax(float* scores, int64_t begin, int64_t end) {
  const int64_t first = begin / kKeyBlock * kKeyBlock, last = (end + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
  for (int64_t t = first; t < begin; ++t) scores[t] = -std::numeric_limits<float>::infinity();
  for (int64_t t = end; t < last; ++t) scores[t] = -std::numeric_limits<float>::infinity();
  Vector most = filled(-std::numeric_limits<float>::infinity());
  for (int64_t t = first; t < last; t += kLanes) {
    const Vector value = load_floats(scores + t);
    most = value > most ? value : most;
  }
  const float top = largest_of(most);
  Vector sums = {};
  for (int64_t t = first; t < last; t += kLanes) {
    const Vector apart = top - load_floats(scores + t);  // NaN stays NaN
    const Vector value = apart > kFar ? Vector{} : exp_of(-apart, Vector{});
    sums += value;
    store_floats(scores + t, value);
  }
  const float inverse = 1 / sum_of(sums);
  for (int64_t t = first; t < last; t += kLanes) store_floats(scores + t, load_floats(scores + t) * inverse);
}

// out[h][i] += sum of weights[h][t] values[t][i] over [begin, end), one after the other: pages change no sum.
template <int kHeads, int kVectors, typename Stored>
INLINE void weigh_values(const float* weights, int64_t stride, const Stored* values, const float* value_scales, int64_t padded,
                         int64_t begin, int64_t end, float (*out)[kMostHeadSize], int64_t place) {
  Vector sums[kHeads][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[h][v] = load_floats(out[h] + place + v * kLanes);
  for (int64_t t = begin; t < end; ++t) {
    const float scale = value_scales ? value_scales[t] : 1;
    const Stored* from = values + t * padded + place;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vector numbers = load_numbers(from + v * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) sums[h][v] += numbers * (weights[h * stride + t] * scale);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) store_floats(out[h] + place + v * kLanes, sums[h][v]);
}

// A head of a page: the tokens [begin, end) of it are attended to.
template <typename Stored>
struct PagePart {
  const Stored* keys;
  const Stored* values;
  const float* key_scales;  // null where there are none
  const float* value_scales;
  int64_t start, begin, end;  // `start`: the position of the page's first token
};

// `keys` and `values`: how much of `Stored` a token has of each.
template <typename Stored>
INLINE PagePart<Stored> page_part(const AttentionTask& task, int64_t sequence, int64_t page, int64_t kv_head, int64_t begin,
                                  int64_t end, int64_t keys, int64_t values) {
  const Cache& cache = *task.cache;
  const int64_t index = head_index(task, sequence, page, kv_head), start = page * cache.page;
  const bool scaled = cache.kind != kBfloat16Cache;
  return {static_cast<const Stored*>(cache.keys) + index * cache.page * keys,
          static_cast<const Stored*>(cache.values) + index * cache.page * values,
          scaled ? cache.key_scales + index * cache.page : nullptr,
          scaled ? cache.value_scales + index * cache.page : nullptr,
          start,
          std::max<int64_t>(0, begin - start),
          std::min(cache.page, end - start)};
}

// Heads that share their keys and values, from `head` on.
template <int kHeads, typename Stored>
void attend_together(const AttentionTask& task, int64_t row, int64_t head, float* scores) {
  const Program& program = *task.program;
  const int64_t size = program.head_size, padded = padded_head(program), place = task.position[row];
  const int64_t kv_head = head / (program.heads / program.kv_heads), sequence = task.sequence[row];
  const int64_t begin = task.window > 0 ? std::max<int64_t>(0, place + 1 - task.window) : 0;
  const int64_t first = begin / task.cache->page, last = place / task.cache->page;
  const int64_t stride = task.cache->most * task.cache->page;
  alignas(64) float queries[kHeads][kQueryRoom] = {}, out[kHeads][kMostHeadSize] = {};
  const float* row_queries = task.qkv + row * (program.heads + 2 * program.kv_heads) * size;
  for (int h = 0; h < kHeads; ++h) turned(task, row_queries + (head + h) * size, place, queries[h]);
  for (int64_t page = first; page <= last; ++page) {
    const auto part = page_part<Stored>(task, sequence, page, kv_head, begin, place + 1, size, padded);
    score_keys<kHeads>(queries, part.keys, part.key_scales, task.scale, size, part.begin / kKeyBlock,
                       (part.end - 1) / kKeyBlock, scores + part.start, stride);
  }
  for (int h = 0; h < kHeads; ++h) softmax(scores + h * stride, begin, place + 1);
  for (int64_t page = first; page <= last; ++page) {
    const auto part = page_part<Stored>(task, sequence, page, kv_head, begin, place + 1, size, padded);
    const float* weights = scores + part.start;
    int64_t i = 0;
    for (; i + 4 * kLanes <= padded; i += 4 * kLanes)
      weigh_values<kHeads, 4>(weights, stride, part.values, part.value_scales, padded, part.begin, part.end, out, i);
    for (; i < padded; i += kLanes)
      weigh_values<kHeads, 1>(weights, stride, part.values, part.value_scales, padded, part.begin, part.end, out, i);
  }
  for (int h = 0; h < kHeads; ++h)
    std::memcpy(task.out + (row * program.heads + head + h) * size, out[h], size * sizeof(float));
}

#include "attention_fours.h"

void append(const AttentionTask& task, int64_t row, int64_t kv_head) {
  const Program& program = *task.program;
  const Cache& cache = *task.cache;
  const int64_t size = program.head_size, position = task.position[row], padded = padded_head(program);
  const int64_t place = position % cache.page;
  const int64_t head = head_index(task, task.sequence[row], position / cache.page, kv_head);
  const float* row_qkv = task.qkv + row * (program.heads + 2 * program.kv_heads) * size;
  const float* value = row_qkv + (program.heads + program.kv_heads + kv_head) * size;
  alignas(64) float key[kMostHeadSize];
  turned(task, row_qkv + (program.heads + kv_head) * size, position, key);
  if (cache.kind == kInt4Cache) {
    alignas(64) float rotated[kMostHeadSize];
    std::memcpy(rotated, value, size * sizeof(float));
    return append_fours(task, row, kv_head, key, rotated);
  }
  const int64_t key_start = head * cache.page * size + place / kKeyBlock * kKeyBlock * size + place % kKeyBlock;
  const int64_t value_start = (head * cache.page + place) * padded;
  if (cache.kind == kBfloat16Cache) {
    uint16_t* keys = static_cast<uint16_t*>(cache.keys) + key_start;
    uint16_t* values = static_cast<uint16_t*>(cache.values) + value_start;
    for (int64_t i = 0; i < size; ++i) keys[i * kKeyBlock] = to_bfloat16(key[i]);
    for (int64_t i = 0; i < padded; ++i) values[i] = i < size ? to_bfloat16(value[i]) : 0;
    return;
  }
  int8_t numbers[kMostHeadSize] = {};
  cache.key_scales[head * cache.page + place] = to_int8(key, size, numbers);
  int8_t* keys = static_cast<int8_t*>(cache.keys) + key_start;
  for (int64_t i = 0; i < size; ++i) keys[i * kKeyBlock] = numbers[i];
  cache.value_scales[head * cache.page + place] = to_int8(value, size, numbers);
  std::memcpy(static_cast<int8_t*>(cache.values) + value_start, numbers, padded);
}

// As many heads at a time as have their sums in registers; a head's results do not depend on the others.
template <int kHeads, typename Stored>
void attend_with(const AttentionTask& task, int64_t row, int64_t head, int64_t heads, float* scores) {
  for (; heads >= kHeads; head += kHeads, heads -= kHeads) {
    if constexpr (std::is_same_v<Stored, uint8_t>)
      attend_fours<kHeads>(task, row, head, scores);
    else
      attend_together<kHeads, Stored>(task, row, head, scores);
  }
  if constexpr (kHeads > 1) attend_with<kHeads / 2, Stored>(task, row, head, heads, scores);
}

void attend(const AttentionTask& task, int64_t row, int64_t head, int64_t heads, float* scores) {
  static_assert(kFloatRows <= kHeadsTogether);
  if (task.cache->kind == kInt4Cache)
    attend_with<kFloatRows, uint8_t>(task, row, head, heads, scores);
  else if (task.cache->kind == kInt8Cache)
    attend_with<kFloatRows, int8_t>(task, row, head, heads, scores);
  else
    attend_with<kFloatRows, uint16_t>(task, row, head, heads, scores);
}
