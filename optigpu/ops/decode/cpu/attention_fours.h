// Attention over a cache of 4-bit numbers. Included once for each instruction set; see instruction_sets.h.
//
// Keys and values are rotated before they are rounded, so that no number of a head is much larger than the others (Ashkboos et
// al., QuaRot, 2024, arXiv:2404.00456). A query is rotated as well, which leaves its products with keys as they are, and a
// result is rotated back. All products are of integers: queries, and weights of 16 tokens at a time, are rounded to 8 bits.

constexpr int64_t kHeadPiece = kChunk;  // numbers of a head that are multiplied together; a head is padded to whole ones
constexpr int64_t kMostHeadPieces = kMostHeadSize / kHeadPiece;

// x = H x / sqrt(n) for each n numbers, n being the largest power of two that divides the size: its own inverse.
INLINE void rotate(float* x, int64_t size) {
  const int64_t count = size & -size;
  for (int64_t apart = 1; apart < count; apart *= 2)
    for (int64_t first = 0; first < size; first += 2 * apart)
      for (int64_t i = first; i < first + apart; ++i) {
        const float a = x[i], b = x[i + apart];
        x[i] = a + b;
        x[i + apart] = a - b;
      }
  const float scale = 1 / std::sqrt(static_cast<float>(count));
  for (int64_t i = 0; i < size; ++i) x[i] *= scale;
}

// The scale of a head's 4-bit numbers, and those, from 0 to 15; the largest, whatever its sign, becomes 0.
inline float to_int4(const float* x, int64_t size, uint8_t* q) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::fabs(x[i]) > std::fabs(largest) ? x[i] : largest;
  const float inverse = std::fabs(largest) > 0x1p-120f ? -kFoursZero / largest : 0;
  for (int64_t i = 0; i < size; ++i) {
    const float whole = std::nearbyint(x[i] * inverse);
    q[i] = static_cast<uint8_t>(std::max(0.0f, std::min(15.0f, whole + kFoursZero)));
  }
  return inverse == 0 ? 0 : largest / -kFoursZero;
}

// A number's byte and half: in both layouts the halves of a byte are 4 numbers apart.
INLINE void put_four(uint8_t* bytes, bool upper, uint8_t number) {
  *bytes = upper ? (*bytes & 0x0f) | number << 4 : (*bytes & 0xf0) | number;
}

// Blocks of 16 tokens: keys are chunks of 8 numbers, [chunk][token][4 bytes]; values are 2 times 8 tokens, [eight][number][4 bytes].
INLINE int64_t key_bytes(const Program& program) { return (program.head_size + kHeadPiece - 1) / kHeadPiece * kHeadPiece / 2; }
INLINE int64_t value_bytes(const Program& program) { return padded_head(program) / 2; }

// `key` and `value` are changed.
void append_fours(const AttentionTask& task, int64_t row, int64_t kv_head, float* key, float* value) {
  const Program& program = *task.program;
  const Cache& cache = *task.cache;
  const int64_t size = program.head_size, position = task.position[row], place = position % cache.page;
  const int64_t head = head_index(task, task.sequence[row], position / cache.page, kv_head);
  const int64_t token = place % kKeyBlock, block = head * cache.page + place - token;  // the block's first token
  uint8_t q[kMostHeadSize];
  rotate(key, size);
  cache.key_scales[head * cache.page + place] = to_int4(key, size, q);
  uint8_t* keys = static_cast<uint8_t*>(cache.keys) + block * key_bytes(program);
  for (int64_t i = 0; i < size; ++i) put_four(keys + i / 8 * kChunkBytes + token * 4 + i % 4, i % 8 >= 4, q[i]);
  rotate(value, size);
  cache.value_scales[head * cache.page + place] = to_int4(value, size, q);
  uint8_t* values = static_cast<uint8_t*>(cache.values) + block * value_bytes(program) + token / 8 * padded_head(program) * 4;
  for (int64_t i = 0; i < size; ++i) put_four(values + i * 4 + token % 4, token % 8 >= 4, q[i]);
}

// Heads' numbers as the rows of a tile, see Activations: [piece][head][number].
template <int kHeads>
struct Rounded {
  alignas(64) int8_t q[kMostHeadPieces * kHeads * kHeadPiece];
  float step[kHeads];
  int32_t less[kHeads];

  // numbers: [kHeads][kStride], of which `size` count; those that fill up the last piece are zeros.
  template <int64_t kStride>
  INLINE void set(const float (*numbers)[kStride], int64_t size) {
    std::memset(q, 0, sizeof q);
    for (int h = 0; h < kHeads; ++h) {
      float most = 0;
      for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(numbers[h][i]));
      const float inverse = most > 0x1p-120f ? 127 / most : 0;
      int32_t sum = 0;
      for (int64_t i = 0; i < size; ++i) {
        const int8_t number = static_cast<int8_t>(std::nearbyint(numbers[h][i] * inverse));
        q[(i / kHeadPiece * kHeads + h) * kHeadPiece + i % kHeadPiece] = number;
        sum += number;
      }
      step[h] = inverse == 0 ? 0 : most / 127;
      less[h] = -kFoursZero * sum;
    }
  }
};

// A block of the next page and its scales: pages are short, and each begins where no hardware prefetcher looks.
INLINE void prefetch_block(const uint8_t* from, int64_t bytes, const float* scales) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
  __builtin_prefetch(scales);
}

template <int kHeads>
INLINE void score_fours(const Rounded<kHeads>& queries, const PagePart<uint8_t>& page, const PagePart<uint8_t>& next, float scale,
                        int64_t key_bytes, float* scores, int64_t stride) {
  constexpr int64_t kPieceBytes = kHeadPiece / 8 * kChunkBytes;
  for (int64_t block = page.begin / kKeyBlock; block <= (page.end - 1) / kKeyBlock; ++block) {
    const int64_t offset = block * kKeyBlock * key_bytes;
    prefetch_block(next.keys + offset, kKeyBlock * key_bytes, next.key_scales + block * kKeyBlock);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const uint8_t* from = page.keys + offset + part * kLanes * 4;
      Bits totals[kHeads];
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) totals[h] = Bits{} + queries.less[h];
      const int8_t* q = queries.q;
      for (int64_t left = kKeyBlock * key_bytes; left > 0; left -= kPieceBytes) {
        add_group<kHeads, 1, Stored::kFours, false>(from, q, totals);
        from += kPieceBytes;
        q += kHeads * kHeadPiece;
      }
      const int64_t place = block * kKeyBlock + part * kLanes;
      const Vector scales = load_floats(page.key_scales + place);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
        store_floats(scores + h * stride + place,
                     __builtin_convertvector(totals[h], Vector) * (scales * (queries.step[h] * scale)));
    }
  }
}

// The weights of a block's tokens, times the scales of their values, as 8-bit numbers.
template <int kHeads>
struct BlockWeights {
  alignas(16) int8_t q[kHeads][kKeyBlock];
  float step[kHeads];
  int32_t less[kHeads];

  // Weights that are 0 are of tokens that do not count, whose scales may be anything.
  INLINE void set(const float* weights, int64_t stride, const float* value_scales) {
    constexpr float kRound = 0x1.8p23f;  // a sum with it has no fraction, and its last bits are the whole number
    for (int h = 0; h < kHeads; ++h) {
      Vector products[kParts], most = {};
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const Vector weight = load_floats(weights + h * stride + part * kLanes);
        products[part] = weight > 0 ? weight * load_floats(value_scales + part * kLanes) : Vector{};
        const Vector size = magnitude(products[part]);
        most = size > most ? size : most;
      }
      const float largest = largest_of(most), inverse = largest > 0x1p-120f ? 127 / largest : 0;
      Bits total = {};
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        Vector scaled = products[part] * inverse;
        OPAQUE(scaled);  // the product is rounded before the sum, not joined with it
        const Bits whole = bits_of(scaled + kRound) - 0x4b400000;
        total += whole;
        store_bytes(q[h] + part * kLanes, whole);
      }
      step[h] = inverse == 0 ? 0 : largest / 127;
      less[h] = -kFoursZero * sum_of(total);
    }
  }
};

// out[h] += weighted values of a block, for kLanes numbers from `place` on.
template <int kHeads>
INLINE void weigh_fours(const BlockWeights<kHeads>& weights, const uint8_t* values, int64_t padded, int64_t place,
                        float (*out)[kMostHeadSize]) {
  const Bits low = Bits{} + 0x0f0f0f0f;
  Sums4 sums[kHeads] = {};
#pragma GCC unroll 2
  for (int eight = 0; eight < 2; ++eight) {
    const Bits both = load_ints(values + (eight * padded + place) * 4);
    const Bits first = both & low, second = (Bits)((Unsigned)both >> 4) & low;
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      sums[h] = add_products4(sums[h], first, four_of(weights.q[h] + eight * 8));
      sums[h] = add_products4(sums[h], second, four_of(weights.q[h] + eight * 8 + 4));
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
    const Vector whole = __builtin_convertvector(widened(sums[h]) + weights.less[h], Vector);
    store_floats(out[h] + place, load_floats(out[h] + place) + whole * weights.step[h]);
  }
}

// Heads that share their keys and values, from `head` on.
template <int kHeads>
void attend_fours(const AttentionTask& task, int64_t row, int64_t head, float* scores) {
  const Program& program = *task.program;
  const int64_t size = program.head_size, padded = padded_head(program), place = task.position[row];
  const int64_t kv_head = head / (program.heads / program.kv_heads), sequence = task.sequence[row];
  const int64_t begin = task.window > 0 ? std::max<int64_t>(0, place + 1 - task.window) : 0;
  const int64_t first = begin / task.cache->page, last = place / task.cache->page;
  const int64_t stride = task.cache->most * task.cache->page, keys = key_bytes(program), values = value_bytes(program);
  alignas(64) float queries[kHeads][kQueryRoom] = {}, out[kHeads][kMostHeadSize] = {};
  const float* row_queries = task.qkv + row * (program.heads + 2 * program.kv_heads) * size;
  for (int h = 0; h < kHeads; ++h) {
    turned(task, row_queries + (head + h) * size, place, queries[h]);
    rotate(queries[h], size);
  }
  Rounded<kHeads> rounded;
  rounded.template set<kQueryRoom>(queries, size);
  const auto part_of = [&](int64_t page) {
    return page_part<uint8_t>(task, sequence, page, kv_head, begin, place + 1, keys, values);
  };
  for (int64_t page = first; page <= last; ++page) {
    const auto part = part_of(page), next = part_of(std::min(page + 1, last));
    score_fours<kHeads>(rounded, part, next, task.scale, keys, scores + part.start, stride);
  }
  for (int h = 0; h < kHeads; ++h) softmax(scores + h * stride, begin, place + 1);
  BlockWeights<kHeads> weights;
  for (int64_t page = first; page <= last; ++page) {
    const auto part = part_of(page), next = part_of(std::min(page + 1, last));
    for (int64_t t = part.begin / kKeyBlock * kKeyBlock; t < part.end; t += kKeyBlock) {
      prefetch_block(next.values + t * values, kKeyBlock * values, next.value_scales + t);
      weights.set(scores + part.start + t, stride, part.value_scales + t);
      for (int64_t i = 0; i < padded; i += kLanes) weigh_fours<kHeads>(weights, part.values + t * values, padded, i, out);
    }
  }
  for (int h = 0; h < kHeads; ++h) {
    rotate(out[h], size);
    std::memcpy(task.out + (row * program.heads + head + h) * size, out[h], size * sizeof(float));
  }
}
