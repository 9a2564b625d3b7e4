// Attention over a cache of 4-bit numbers. Included once for each instruction set; see instruction_sets.h.
//
// Keys and values are rotated before they are rounded, so that no number of a head is much larger than the others (Ashkboos et
// al., QuaRot, 2024, arXiv:2404.00456). A query is rotated as well, which leaves its products with keys as they are, and a
// result is rotated back. All products are of integers, by the instructions of 4-bit weights and in their layout: keys are a
// matrix of 16 tokens by the head's numbers, values one of the head's numbers by 16 tokens. Queries, and weights of 16 tokens
// at a time, are rounded to 8 bits.

constexpr int64_t kMostHeadPieces = kMostHeadSize / kChunk;  // a head's keys are filled up to whole chunks of 32 numbers

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

INLINE int64_t key_numbers(const Program& program) { return (program.head_size + kChunk - 1) / kChunk * kChunk; }

// Puts a number into a block of 16 outputs; see load_eight.
INLINE void put_four(uint8_t* block, int64_t output, int64_t input, uint8_t number) {
  uint8_t& both = block[input / 8 * kChunkBytes + output * 4 + input % 4];  // the halves are 4 inputs apart
  both = input % 8 >= 4 ? (both & 0x0f) | number << 4 : (both & 0xf0) | number;
}

// `key` and `value` are changed.
void append_fours(const Program& program, const Cache& cache, Place place, float* key, float* value) {
  const int64_t size = program.head_size;
  uint8_t* keys = static_cast<uint8_t*>(cache.keys) + place.block() * key_numbers(program) / 2;
  uint8_t* values = static_cast<uint8_t*>(cache.values) + place.block() * padded_head(program) / 2;
  uint8_t q[kMostHeadSize];
  rotate(key, size);
  cache.key_scales[place.token] = to_int4(key, size, q);
  for (int64_t i = 0; i < size; ++i) put_four(keys, place.lane, i, q[i]);
  rotate(value, size);
  cache.value_scales[place.token] = to_int4(value, size, q);
  for (int64_t i = 0; i < size; ++i) put_four(values + i / 16 * 2 * kChunkBytes, i % 16, place.lane, q[i]);
}

// The weights of a section's tokens, times the scales of their values, rounded block by block. As many blocks at a time as have
// a lane for each of their heads, since a lane after the other is what takes time.
template <int kHeads>
struct SectionWeights {
  static constexpr int kTogether = std::min<int>(kSectionBlocks, kLanes / kHeads), kCount = kTogether * kHeads;
  alignas(64) int8_t q[kSectionBlocks][kHeads][kKeyBlock];
  alignas(64) float steps[kSectionBlocks / kTogether][kLanes];  // see `lane`
  alignas(64) int32_t lesses[kSectionBlocks / kTogether][kLanes];

  static constexpr int lane(int64_t block, int h) { return (block % kTogether * kHeads + h) * (kLanes / kCount); }
  float step(int64_t block, int h) const { return steps[block / kTogether][lane(block, h)]; }
  int32_t less(int64_t block, int h) const { return lesses[block / kTogether][lane(block, h)]; }

  // sums[h] += weights.
  INLINE void set(const Section& section, const float* scores, int64_t stride, const float (&top)[kHeads], Vector (&sums)[kHeads]) {
    for (int64_t first = 0; first < section.blocks; first += kTogether) {
      alignas(64) float products[kCount][kKeyBlock];
      Vector sizes[kCount];
#pragma GCC unroll 4
      for (int b = 0; b < kTogether; ++b) {
        const int64_t place = (first + b) * kKeyBlock;
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h)
          sizes[b * kHeads + h] = first + b < section.blocks ? weighted(scores + h * stride + place, section.value_scales + place,
                                                                        top[h], sums[h], products[b * kHeads + h])
                                                             : Vector{};
      }
      round(first, std::min<int64_t>(kTogether, section.blocks - first), products, sizes);
    }
  }

 private:
  // A block of a head; gives the largest sizes of each lane. Weights that are 0 are of tokens that do not count, whose scales may
  // be anything.
  static INLINE Vector weighted(const float* scores, const float* scales, float top, Vector& sum, float* products) {
    Vector most;
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const Vector weight = power_of_two(load_floats(scores + part * kLanes) - top);
      sum += weight;
      const Vector product = weight > 0 ? weight * load_floats(scales + part * kLanes) : Vector{}, size = magnitude(product);
      most = part == 0 ? size : size > most ? size : most;
      store_floats(products + part * kLanes, product);
    }
    return most;
  }

  INLINE void round(int64_t first, int64_t blocks, const float (&products)[kCount][kKeyBlock], const Vector (&sizes)[kCount]) {
    const Vector largest = combined_each(sizes, [](auto a, auto b) { return b > a ? b : a; });
    alignas(64) float inverse[kLanes];
    store_floats(inverse, largest > 0x1p-120f ? 127 / largest : Vector{});
    store_floats(steps[first / kTogether], largest > 0x1p-120f ? largest / 127 : Vector{});
    const float* factors = inverse;
    asm("" : "+r"(factors));  // as above
    Bits totals[kCount];
#pragma GCC unroll 4
    for (int b = 0; b < kTogether; ++b)
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
        totals[b * kHeads + h] = b < blocks ? rounded(products[b * kHeads + h], factors[lane(b, h)], q[first + b][h]) : Bits{};
    const Bits total = combined_each(totals, [](auto a, auto b) { return a + b; }) * -kFoursZero;
    std::memcpy(lesses[first / kTogether], &total, sizeof total);
  }

  // A block of a head; gives the sums of each lane.
  static INLINE Bits rounded(const float* products, float inverse, int8_t* to) {
    constexpr float kRound = 0x1.8p23f;  // a sum with it has no fraction, and its last bits are the whole number
    Bits total = {};
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      Vector scaled = load_floats(products + part * kLanes) * inverse;
      OPAQUE(scaled);  // the product is rounded before the sum, not joined with it
      const Bits whole = bits_of(scaled + kRound) - 0x4b400000;
      total += whole;
      store_bytes(to + part * kLanes, whole);
    }
    return total;
  }
};

template <int kHeads>
struct Fours {
  const int64_t size, padded, keys;
  float step[kHeads];
  int32_t less[kHeads];
  alignas(64) int8_t q[kMostHeadPieces * kHeads * kChunk];  // as the rows of a tile, see Activations: [piece][head][number]

  Fours(const Program& program, float (&queries)[kHeads][kQueryRoom], float scale)
      : size(program.head_size), padded(padded_head(program)), keys(key_numbers(program)) {
    std::memset(q, 0, keys * kHeads);
    for (int h = 0; h < kHeads; ++h) {
      rotate(queries[h], size);
      round(h, queries[h]);
      step[h] *= scale;
    }
  }

  int64_t key_bytes() const { return keys / 2; }
  int64_t value_bytes() const { return padded / 2; }

  // scores[h][t], before anything is masked.
  INLINE void score(const Section& section, const Section& ahead, float* scores, int64_t stride) const {
    for (int64_t block = 0; block < section.blocks; ++block) {
      const int64_t bytes = kKeyBlock * key_bytes();
      if (block < ahead.blocks) prefetch_block(ahead.keys + block * bytes, bytes, ahead.key_scales + block * kKeyBlock);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)
        score_part(section.keys + block * bytes + part * kLanes * 4, section.key_scales + block * kKeyBlock + part * kLanes,
                   scores + block * kKeyBlock + part * kLanes, stride);
    }
  }

  // out[h] += weighted values, and sums[h] += weights.
  INLINE void weigh(const Span&, const Section& section, const Section& ahead, const float* scores, int64_t stride,
                    const float (&top)[kHeads], Vector (&sums)[kHeads], float (*out)[kMostHeadSize]) const {
    const int64_t bytes = kKeyBlock * value_bytes();
    for (int64_t block = 0; block < ahead.blocks; ++block)
      prefetch_block(ahead.values + block * bytes, bytes, ahead.value_scales + block * kKeyBlock);
    SectionWeights<kHeads> weights;
    weights.set(section, scores, stride, top, sums);
    int64_t place = 0;
    for (; place + 2 * kLanes <= padded; place += 2 * kLanes) add<2>(weights, section, place, out);
    for (; place < padded; place += kLanes) add<1>(weights, section, place, out);
  }

  void finish(float* out) const { rotate(out, size); }

 private:
  void round(int h, const float* query) {
    float most = 0;
    for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(query[i]));
    const float inverse = most > 0x1p-120f ? 127 / most : 0;
    int32_t sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int8_t number = static_cast<int8_t>(std::nearbyint(query[i] * inverse));
      q[(i / kChunk * kHeads + h) * kChunk + i % kChunk] = number;
      sum += number;
    }
    step[h] = inverse == 0 ? 0 : most / 127;
    less[h] = -kFoursZero * sum;
  }

  INLINE void prefetch_block(const uint8_t* from, int64_t bytes, const float* scales) const {
    prefetch(from, bytes);
    __builtin_prefetch(scales);
  }

  // The tokens of a register.
  INLINE void score_part(const uint8_t* from, const float* key_scales, float* scores, int64_t stride) const {
    constexpr int64_t kPieceBytes = kChunk / 8 * kChunkBytes;
    Bits totals[kHeads];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) totals[h] = Bits{} + less[h];
    const int8_t* x = q;
    for (int64_t left = keys; left > 0; left -= kChunk, from += kPieceBytes, x += kHeads * kChunk)
      add_group<kHeads, 1, Stored::kFours, false>(from, x, totals);
    const Vector scales = load_floats(key_scales);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
      store_floats(scores + h * stride, __builtin_convertvector(totals[h], Vector) * (scales * step[h]));
  }

  // out[h] += weighted values, for the numbers of some registers.
  template <int kVectors>
  INLINE void add(const SectionWeights<kHeads>& weights, const Section& section, int64_t place,
                  float (*out)[kMostHeadSize]) const {
    Vector totals[kHeads][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) totals[h][v] = load_floats(out[h] + place + v * kLanes);
    for (int64_t block = 0; block < section.blocks; ++block)
      add_block(weights, block, section.values + block * kKeyBlock * value_bytes(), place, totals);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) store_floats(out[h] + place + v * kLanes, totals[h][v]);
  }

  template <int kVectors>
  INLINE void add_block(const SectionWeights<kHeads>& weights, int64_t block, const uint8_t* values, int64_t place,
                        Vector (&totals)[kHeads][kVectors]) const {
    const int8_t* x = weights.q[block][0];
    asm("" : "+r"(x));  // loaded for each product: a compiler that keeps them all has no registers left
    Sums4 sums[kHeads][kVectors] = {};
#pragma GCC unroll 2
    for (int k = 0; k < kKeyBlock; k += 8) {
      Bits first[kVectors], second[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const int64_t at = place + v * kLanes;
        load_eight<Stored::kFours>(values + at / 16 * 2 * kChunkBytes + at % 16 * 4, k, first[v], second[v]);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          sums[h][v] = add_products4(sums[h][v], first[v], four_of(x + h * kKeyBlock + k));
          sums[h][v] = add_products4(sums[h][v], second[v], four_of(x + h * kKeyBlock + k + 4));
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        const Vector whole = __builtin_convertvector(widened(sums[h][v]) + weights.less(block, h), Vector);
        totals[h][v] += whole * weights.step(block, h);
      }
  }
};
