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

// scores[t] of the blocks of keys from `first` to `last`, before anything is masked.
template <typename Stored>
void score_keys(const float* query, const Stored* keys, const float* key_scales, float scale, int64_t size, int64_t first,
                int64_t last, float* scores) {
  constexpr int kChains = 4 / kParts > 0 ? 4 / kParts : 1;
  for (int64_t block = first; block <= last; ++block) {
    const Stored* from = keys + block * kKeyBlock * size;
    Vector sums[kParts][kChains] = {};
    for (int64_t i = 0; i < size; i += kChains)
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part)
          sums[part][c] += load_numbers(from + (i + c) * kKeyBlock + part * kLanes) * query[i + c];
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Vector sum = sums[part][0];
#pragma GCC unroll 4
      for (int c = 1; c < kChains; ++c) sum += sums[part][c];
      const int64_t place = block * kKeyBlock + part * kLanes;
      sum *= scale;
      store_floats(scores + place, key_scales ? sum * load_floats(key_scales + place) : sum);
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

// out[i] += sum of weights[t] values[t][i] over [begin, end), one after the other: pages change no sum.
template <int kVectors, typename Stored>
INLINE void weigh_values(const float* weights, const Stored* values, const float* value_scales, int64_t padded,
                         int64_t begin, int64_t end, float* out) {
  Vector sums[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) sums[v] = load_floats(out + v * kLanes);
  for (int64_t t = begin; t < end; ++t) {
    const float weight = value_scales ? weights[t] * value_scales[t] : weights[t];
    const Stored* from = values + t * padded;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] += load_numbers(from + v * kLanes) * weight;
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) store_floats(out + v * kLanes, sums[v]);
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

template <typename Stored>
INLINE PagePart<Stored> page_part(const AttentionTask& task, int64_t sequence, int64_t page, int64_t kv_head, int64_t begin,
                                  int64_t end) {
  const Cache& cache = *task.cache;
  const int64_t index = head_index(task, sequence, page, kv_head), start = page * cache.page;
  const bool scaled = cache.kind == kInt8Cache;
  return {static_cast<const Stored*>(cache.keys) + index * cache.page * task.program->head_size,
          static_cast<const Stored*>(cache.values) + index * cache.page * padded_head(*task.program),
          scaled ? cache.key_scales + index * cache.page : nullptr,
          scaled ? cache.value_scales + index * cache.page : nullptr,
          start,
          std::max<int64_t>(0, begin - start),
          std::min(cache.page, end - start)};
}

template <typename Stored>
void attend_with(const AttentionTask& task, int64_t row, int64_t head, float* scores) {
  const Program& program = *task.program;
  const int64_t size = program.head_size, padded = padded_head(program), place = task.position[row];
  const int64_t kv_head = head / (program.heads / program.kv_heads), sequence = task.sequence[row];
  const int64_t begin = task.window > 0 ? std::max<int64_t>(0, place + 1 - task.window) : 0;
  const int64_t first = begin / task.cache->page, last = place / task.cache->page;
  alignas(64) float query[kMostHeadSize + 4] = {}, out[kMostHeadSize] = {};
  turned(task, task.qkv + row * (program.heads + 2 * program.kv_heads) * size + head * size, place, query);
  for (int64_t page = first; page <= last; ++page) {
    const auto part = page_part<Stored>(task, sequence, page, kv_head, begin, place + 1);
    score_keys(query, part.keys, part.key_scales, task.scale, size, part.begin / kKeyBlock, (part.end - 1) / kKeyBlock,
               scores + part.start);
  }
  softmax(scores, begin, place + 1);
  for (int64_t page = first; page <= last; ++page) {
    const auto part = page_part<Stored>(task, sequence, page, kv_head, begin, place + 1);
    const float* weights = scores + part.start;
    int64_t i = 0;
    for (; i + 4 * kLanes <= padded; i += 4 * kLanes)
      weigh_values<4>(weights, part.values + i, part.value_scales, padded, part.begin, part.end, out + i);
    for (; i < padded; i += kLanes)
      weigh_values<1>(weights, part.values + i, part.value_scales, padded, part.begin, part.end, out + i);
  }
  std::memcpy(task.out + row * program.heads * size + head * size, out, size * sizeof(float));
}

void attend(const AttentionTask& task, int64_t row, int64_t head, float* scores) {
  if (task.cache->kind == kInt8Cache)
    attend_with<int8_t>(task, row, head, scores);
  else
    attend_with<uint16_t>(task, row, head, scores);
}
