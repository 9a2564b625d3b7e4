// Attention over a cache of bfloat16 or 8-bit numbers, by products of floats. Included once for each instruction set; see
// instruction_sets.h.
//
// It reads from one end of a head to the other, which hardware prefetchers follow: prefetching beside them takes longer.

INLINE Vector load_numbers(const uint16_t* from) { return load_bfloat16(from); }

INLINE Vector load_numbers(const int8_t* from) { return __builtin_convertvector(load_bytes(from), Vector); }

// The scale of a head's int8 numbers, and those.
inline float to_int8(const float* x, int64_t size, int8_t* q) {
  float most = 0;
  for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(x[i]));
  const float inverse = most > 0x1p-120f ? 127 / most : 0;
  for (int64_t i = 0; i < size; ++i) q[i] = static_cast<int8_t>(std::nearbyint(x[i] * inverse));
  return inverse == 0 ? 0 : most / 127;
}

template <typename Number>
INLINE void put_numbers(const Program& program, const Cache& cache, Place place, const Number* key, const Number* value) {
  const int64_t size = program.head_size, padded = padded_head(program);
  Number* keys = static_cast<Number*>(cache.keys) + place.block() * size + place.lane;
  for (int64_t i = 0; i < size; ++i) keys[i * kKeyBlock] = key[i];
  std::memcpy(static_cast<Number*>(cache.values) + place.token * padded, value, padded * sizeof(Number));
}

void append_bfloat16s(const Program& program, const Cache& cache, Place place, const float* key, const float* value) {
  uint16_t keys[kMostHeadSize], values[kMostHeadSize] = {};
  for (int64_t i = 0; i < program.head_size; ++i) keys[i] = to_bfloat16(key[i]), values[i] = to_bfloat16(value[i]);
  put_numbers(program, cache, place, keys, values);
}

void append_eights(const Program& program, const Cache& cache, Place place, const float* key, const float* value) {
  int8_t keys[kMostHeadSize], values[kMostHeadSize] = {};
  cache.key_scales[place.token] = to_int8(key, program.head_size, keys);
  cache.value_scales[place.token] = to_int8(value, program.head_size, values);
  put_numbers(program, cache, place, keys, values);
}

template <int kHeads, typename Number>
struct Floats {
  static constexpr bool kScaled = std::is_same_v<Number, int8_t>;
  const float (&queries)[kHeads][kQueryRoom];
  const int64_t size, padded;
  const float scale;

  Floats(const Program& program, const float (&queries)[kHeads][kQueryRoom], float scale)
      : queries(queries), size(program.head_size), padded(padded_head(program)), scale(scale) {}

  int64_t key_bytes() const { return size * sizeof(Number); }
  int64_t value_bytes() const { return padded * sizeof(Number); }

  // scores[h][t], before anything is masked.
  INLINE void score(const Section& section, const Section&, float* scores, int64_t stride) const {
    constexpr int kChains = 4 / kParts > 0 ? 4 / kParts : 1;
    for (int64_t block = 0; block < section.blocks; ++block) {
      const Number* from = reinterpret_cast<const Number*>(section.keys) + block * kKeyBlock * size;
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
          store_floats(scores + h * stride + place, kScaled ? sum * load_floats(section.key_scales + place) : sum);
        }
    }
  }

  // out[h] += weighted values, and sums[h] += weights. One token after the other: sections change no sum.
  INLINE void weigh(const Span& span, const Section& section, const Section&, float* scores, int64_t stride,
                    const float (&top)[kHeads], Vector (&sums)[kHeads], float (*out)[kMostHeadSize]) const {
    for (int h = 0; h < kHeads; ++h)
      for (int64_t t = 0; t < section.blocks * kKeyBlock; t += kLanes) {
        const Vector weight = power_of_two(load_floats(scores + h * stride + t) - top[h]);
        sums[h] += weight;
        store_floats(scores + h * stride + t, kScaled ? weight * load_floats(section.value_scales + t) : weight);
      }
    const int64_t begin = std::max<int64_t>(0, span.begin - section.start);
    const int64_t end = std::min(section.blocks * kKeyBlock, span.end - section.start);
    const Number* values = reinterpret_cast<const Number*>(section.values);
    int64_t i = 0;
    for (; i + 4 * kLanes <= padded; i += 4 * kLanes) add<4>(values + i, scores, stride, begin, end, out, i);
    for (; i < padded; i += kLanes) add<1>(values + i, scores, stride, begin, end, out, i);
  }

  void finish(float*) const {}

 private:
  template <int kVectors>
  INLINE void add(const Number* values, const float* weights, int64_t stride, int64_t begin, int64_t end,
                  float (*out)[kMostHeadSize], int64_t place) const {
    Vector sums[kHeads][kVectors];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[h][v] = load_floats(out[h] + place + v * kLanes);
    for (int64_t t = begin; t < end; ++t)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Vector numbers = load_numbers(values + t * padded + v * kLanes);
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; ++h) sums[h][v] += numbers * weights[h * stride + t];
      }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store_floats(out[h] + place + v * kLanes, sums[h][v]);
  }
};

template <int kHeads>
using Bfloat16s = Floats<kHeads, uint16_t>;
template <int kHeads>
using Eights = Floats<kHeads, int8_t>;
