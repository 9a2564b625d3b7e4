// Products with packed weights. Included once for each instruction set; see instruction_sets.h.
//
// A block is 16 outputs whose weights lie together: a chunk of 64 bytes holds 4 bytes of each, so a register meets 4
// activations that stand in all of its lanes, and nothing is ever summed across lanes.

constexpr int kParts = kBlockOutputs / kLanes;  // registers of a block's sums
constexpr int64_t kChunkBytes = 64;
constexpr int64_t kChunk = 32;           // inputs whose products with 4-bit weights fit 16 bits
constexpr int64_t kPrefetchBytes = 4096;  // a hardware prefetcher stops at each page of 4 KiB

INLINE Bits load_ints(const uint8_t* from) {
  Bits value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

INLINE int32_t four_of(const int8_t* q) {
  int32_t value;
  std::memcpy(&value, q, sizeof value);
  return value;
}

// Bits of a number above its lower four, which lie in chunks after those of 32 inputs.
constexpr int upper_of(Stored stored) { return stored == Stored::kFives ? 1 : stored == Stored::kSixes ? 2 : 0; }

constexpr bool is_uneven(Stored stored) { return stored == Stored::kThrees || stored == Stored::kUneven; }

// Chunks of 64 bytes that 32 inputs of a block take.
constexpr int64_t chunks_of(Stored stored) {
  return stored == Stored::kThrees ? 3 : stored == Stored::kEights ? 8 : 4 + upper_of(stored);
}

// What was added to the weights that load_eight() gives.
constexpr int32_t zero_of(Stored stored) {
  if (stored == Stored::kEights) return kEightsZero;
  return is_uneven(stored) ? kUnevenZero : kFoursZero << upper_of(stored);
}

// What is added to the weights of a group whose scale is odd.
constexpr int32_t move_of(Stored stored) {
  return stored == Stored::kUneven ? kSixteenMove : stored == Stored::kThrees ? kEightMove : 0;
}

// Where a byte of third bits has that of the inputs 4 * four to 4 * four + 3. Those of four and four + 2, whose lower bits are 4
// bits apart, are as well.
constexpr int third_bit(int four) { return four / 4 * 2 + four % 2 + four % 4 / 2 * 4; }

// Numbers of 3 bits of a part's outputs: of 4 inputs in the lower halves of bytes, of those 8 further on in the upper ones.
INLINE Bits three_bits(Bits lower, Bits third, int four) {
  const int bit = third_bit(four);  // comes to bit 2
  const Bits thirds = bit < 2 ? third << (2 - bit) : (Bits)((Unsigned)third >> (bit - 2));
  return ((Bits)((Unsigned)lower >> (2 * (four % 4))) & 0x33333333) | (thirds & 0x44444444);
}

// The upper bits of 4 inputs of a part's outputs, above four zeros. The inputs 4 * four to 4 * four + 3 have theirs from bit
// kCount * four of each byte on.
template <int kCount>
INLINE Bits upper_bits(Bits upper, int four) {
  const int bit = kCount * four;  // comes to bit 4
  const Bits moved = bit < 4 ? upper << (4 - bit) : (Bits)((Unsigned)upper >> (bit - 4));
  return moved & (kCount == 1 ? 0x10101010 : 0x30303030);
}

// 8 inputs of a part's outputs, from the input `k` of a group on: the first 4 in a register, the others in the next.
template <Stored kStored>
INLINE void load_eight(const uint8_t* weights, int k, Bits& first, Bits& second) {
  if constexpr (kStored == Stored::kEights) {
    const uint8_t* from = weights + k / 4 * kChunkBytes;
    first = load_ints(from), second = load_ints(from + kChunkBytes);
  } else if constexpr (kStored == Stored::kThrees) {
    const uint8_t* from = weights + k / kChunk * 3 * kChunkBytes;
    const int four = k % kChunk / 4;
    const Bits lower = load_ints(from + four / 4 * kChunkBytes), third = load_ints(from + 2 * kChunkBytes);
    const int pair = four / 4 * 4, up = four % 4 / 2 * 4;
    const Bits these = three_bits(lower, third, pair), next = three_bits(lower, third, pair + 1);
    first = looked_up(kEightValues, (Bits)((Unsigned)these >> up));
    second = looked_up(kEightValues, (Bits)((Unsigned)next >> up));
  } else {
    constexpr int kUpper = upper_of(kStored);
    const uint8_t* from = weights + k / kChunk * chunks_of(kStored) * kChunkBytes;
    const Bits low = Bits{} + 0x0f0f0f0f, both = load_ints(from + k % kChunk / 8 * kChunkBytes);
    first = both & low, second = (Bits)((Unsigned)both >> 4) & low;
    if constexpr (kStored == Stored::kUneven)
      first = looked_up(kSixteenValues, first), second = looked_up(kSixteenValues, second);
    if constexpr (kUpper > 0) {
      const Bits upper = load_ints(from + (4 + k % kChunk * kUpper / kChunk) * kChunkBytes);
      const int four = k % (kChunk / kUpper) / 4;
      first |= upper_bits<kUpper>(upper, four), second |= upper_bits<kUpper>(upper, four + 1);
    }
  }
}

// The weights of the inputs k to k + 7, which are a share of a chunk or several, some time before they are loaded.
template <Stored kStored>
INLINE void prefetch_eight(const uint8_t* weights, int k) {
  constexpr int kChunks = static_cast<int>(chunks_of(kStored));
#pragma GCC unroll 2
  for (int i = k / 8 * kChunks / 4; i < (k / 8 + 1) * kChunks / 4; ++i)
    __builtin_prefetch(weights + i * kChunkBytes + kPrefetchBytes);
}

// totals[r] += products of a group of 4-bit weights with the rows' numbers. `kAhead`: the weights after these follow them.
template <int kRows, int kChunks, bool kAhead>
INLINE void add_fours(const uint8_t* weights, const int8_t* q, Bits (&totals)[kRows]) {
  constexpr int kGroup = kChunks * kChunk;
  const Bits low = Bits{} + 0x0f0f0f0f;
  // One row alone would wait for its own sums.
  constexpr int kChains = kRows == 1 ? 2 : 1;
  Sums4 sums[kRows][kChains] = {};
  if constexpr (kWideSums) {  // goes on from the totals themselves
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[r][0] = (Sums4)totals[r];
  }
#pragma GCC unroll kUnrolled
  for (int c = 0; c < kChunks; ++c) {
#pragma GCC unroll kUnrolled
    for (int j = 0; j < 4; ++j) {
      const uint8_t* from = weights + (c * 4 + j) * kChunkBytes;
      if (kAhead) __builtin_prefetch(from + kPrefetchBytes);
      const Bits both = load_ints(from);
      const Bits first = both & low, second = (Bits)((Unsigned)both >> 4) & low;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const int8_t* a = q + r * kGroup + c * kChunk + j * 8;
        sums[r][0] = add_products4(sums[r][0], first, four_of(a));
        sums[r][kChains - 1] = add_products4(sums[r][kChains - 1], second, four_of(a + 4));
      }
    }
    if (kWideSums) continue;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain) {
        totals[r] += widened(sums[r][chain]);
        sums[r][chain] = Sums4{};
      }
  }
  if constexpr (kWideSums) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      totals[r] = kChains == 1 ? (Bits)sums[r][0] : (Bits)(sums[r][0] + sums[r][kChains - 1]);
  }
}

// sums + products of 4 weights of a kind, as load_eight() gives them.
template <Stored kStored>
INLINE Bits add_four(Bits sums, Bits weights, int32_t x) {
  if constexpr (kStored == Stored::kEights) return add_products8(sums, weights, x);
  if constexpr (kWideSums) return (Bits)add_products4((Sums4)sums, weights, x);
  return sums + widened(add_products4(Sums4{}, weights, x));
}

// The same of 8-bit weights, of uneven values, and of 5 and 6 bits, of which two products with 4 inputs fit 16 bits.
template <int kRows, int kChunks, Stored kStored>
INLINE void add_eights(const uint8_t* weights, const int8_t* q, Bits (&totals)[kRows]) {
  constexpr int kGroup = kChunks * kChunk;
  Bits others[kRows] = {};
#pragma GCC unroll kUnrolled
  for (int c = 0; c < kChunks; ++c)
#pragma GCC unroll kUnrolled
    for (int k = c * kChunk; k < (c + 1) * kChunk; k += 8) {
      prefetch_eight<kStored>(weights, k);
      Bits first, second;
      load_eight<kStored>(weights, k, first, second);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        Bits& sum = kRows == 1 ? others[r] : totals[r];  // one row alone would wait for its own sum
        const int32_t a = four_of(q + r * kGroup + k), b = four_of(q + r * kGroup + k + 4);
        if constexpr (upper_of(kStored) > 0 && !kWideSums) {
          totals[r] += widened(add_products4(add_products4(Sums4{}, first, a), second, b));
        } else {
          totals[r] = add_four<kStored>(totals[r], first, a);
          sum = add_four<kStored>(sum, second, b);
        }
      }
    }
  if constexpr (kRows == 1) totals[0] += others[0];
}

// The same of any kind of weights, for two rows at a time; a last one without a partner has its products alone.
template <typename Pairs, int kRows, int kChunks, Stored kStored, bool kAhead>
INLINE void add_pairs(const uint8_t* weights, const int8_t* q, Bits (&totals)[kRows]) {
  constexpr int kGroup = kChunks * kChunk;
  Bits sums[kRows / 2][2] = {};
#pragma GCC unroll kUnrolled
  for (int k = 0; k < kGroup; k += 8) {
    if (kAhead) prefetch_eight<kStored>(weights, k);
    Bits first, second;
    load_eight<kStored>(weights, k, first, second);
    const Pairs pairs(first, second);
#pragma GCC unroll 8
    for (int r = 0; r + 1 < kRows; r += 2)
      pairs.add_products(sums[r / 2], q + r * kGroup + k, q + (r + 1) * kGroup + k);
    if constexpr (kRows % 2 == 1) {
      const int8_t* a = q + (kRows - 1) * kGroup + k;
      Bits& sum = totals[kRows - 1];
      sum = add_four<kStored>(add_four<kStored>(sum, first, four_of(a)), second, four_of(a + 4));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r + 1 < kRows; r += 2) {
    totals[r] += Pairs::of_row(sums[r / 2]);
    totals[r + 1] += Pairs::of_next_row(sums[r / 2]);
  }
}

// The fastest of these ways.
template <int kRows, int kChunks, Stored kStored, bool kAhead = true>
INLINE void add_group(const uint8_t* weights, const int8_t* q, Bits (&totals)[kRows]) {
  if constexpr (kRows > 1 && !std::is_void_v<Pairs>)
    add_pairs<Pairs, kRows, kChunks, kStored, kAhead>(weights, q, totals);
  else if constexpr (kStored == Stored::kFours)
    add_fours<kRows, kChunks, kAhead>(weights, q, totals);
  else
    add_eights<kRows, kChunks, kStored>(weights, q, totals);
}

// results[r] = row r of a tile times the outputs of one part of a block.
template <int kRows, int kChunks, Stored kStored>
INLINE void quantized_sums(const Matrix& matrix, int64_t block, int part, const Activations& in, int64_t row,
                           Vector (&results)[kRows]) {
  constexpr int64_t kGroup = kChunks * kChunk;
  constexpr int64_t kGroupBytes = kChunks * chunks_of(kStored) * kChunkBytes;
  const int64_t groups = matrix.inputs / kGroup;
  const uint8_t* weights = matrix.numbers + block * groups * kGroupBytes + part * kLanes * 4;
  const int8_t* scale = matrix.scale + block * groups * kBlockOutputs + part * kLanes;
  const int8_t* q = in.q + row * matrix.inputs;
  const float* step = in.step + row * groups;
  const int32_t* less = in.less + row * groups;
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) results[r] = Vector{};
  for (int64_t g = 0; g < groups; ++g) {
    Bits totals[kRows];
    constexpr int32_t kZero = zero_of(kStored), kMove = move_of(kStored);
    const Bits multiples = load_bytes(scale);
    if constexpr (kMove == 0) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) totals[r] = Bits{} + less[r] * (kZero / kFoursZero);
    } else {
      const Bits zeros = kZero - ((multiples & 1) != 0 ? Bits{} + kMove : Bits{});
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) totals[r] = ((Bits{} + less[r]) * zeros) >> kFoursZeroBits;
    }
    add_group<kRows, kChunks, kStored>(weights, q, totals);
    const Vector scales = __builtin_convertvector(multiples, Vector);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r)
      results[r] += __builtin_convertvector(totals[r], Vector) * (scales * step[r]);
    weights += kGroupBytes;
    scale += kBlockOutputs;
    q += kRows * kGroup;
    step += kRows;
    less += kRows;
  }
  const Vector unit = load_bfloat16(matrix.unit + block * kBlockOutputs + part * kLanes);
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) results[r] *= unit;
}

template <int kRows>
INLINE void bfloat16_sums(const Matrix& matrix, int64_t block, int part, const Activations& in, int64_t row, Vector* results) {
  const uint8_t* weights = matrix.numbers + block * matrix.inputs / 2 * kChunkBytes + part * kLanes * 4;
  constexpr int kChains = 4;  // for any number of rows, so that a row has the same sums beside others
  Vector sums[kRows][kChains] = {};
  const float* x = in.x + row * matrix.inputs;
  for (int64_t k = 0; k < matrix.inputs; k += kChains) {
#pragma GCC unroll 2
    for (int c = 0; c < kChains; c += 2) {
      __builtin_prefetch(weights + kPrefetchBytes);
      const Bits both = load_ints(weights);
      const Vector first = float_of(both << 16), second = float_of(both & static_cast<int32_t>(0xffff0000));
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r][c] += first * x[r * matrix.inputs + k + c];
        sums[r][c + 1] += second * x[r * matrix.inputs + k + c + 1];
      }
      weights += kChunkBytes;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) results[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

// As many rows at a time as have all their sums in registers.
template <int kRows, int kFirst = 0>
INLINE void bfloat16_rows(const Matrix& matrix, int64_t block, int part, const Activations& in, int64_t row,
                          Vector (&results)[kRows]) {
  constexpr int kNow = std::min(kFloatRows, kRows - kFirst);
  bfloat16_sums<kNow>(matrix, block, part, in, row + kFirst, results + kFirst);
  if constexpr (kFirst + kNow < kRows) bfloat16_rows<kRows, kFirst + kNow>(matrix, block, part, in, row, results);
}

template <int kRows, Stored kStored>
INLINE void sums_in_groups(const Matrix& matrix, int64_t block, int part, const Activations& in, int64_t row,
                           Vector (&results)[kRows]) {
  if (matrix.group == 32) return quantized_sums<kRows, 1, kStored>(matrix, block, part, in, row, results);
  if (matrix.group == 64) return quantized_sums<kRows, 2, kStored>(matrix, block, part, in, row, results);
  return quantized_sums<kRows, 4, kStored>(matrix, block, part, in, row, results);
}

template <int kRows>
INLINE void sums_of(const Matrix& matrix, int64_t block, int part, const Activations& in, int64_t row,
                    Vector (&results)[kRows]) {
  if (matrix.kind == kBfloat16Weights) return bfloat16_rows<kRows>(matrix, block, part, in, row, results);
  if (matrix.kind == kFourBits) return sums_in_groups<kRows, Stored::kFours>(matrix, block, part, in, row, results);
  if (matrix.kind == kUnevenFourBits) return sums_in_groups<kRows, Stored::kUneven>(matrix, block, part, in, row, results);
  if (matrix.kind == kUnevenThreeBits) return sums_in_groups<kRows, Stored::kThrees>(matrix, block, part, in, row, results);
  if (matrix.kind == kFiveBits) return sums_in_groups<kRows, Stored::kFives>(matrix, block, part, in, row, results);
  if (matrix.kind == kSixBits) return sums_in_groups<kRows, Stored::kSixes>(matrix, block, part, in, row, results);
  return sums_in_groups<kRows, Stored::kEights>(matrix, block, part, in, row, results);
}

// A block of outputs of some rows, with the bias.
template <int kRows>
void block_sums(const Matrix& matrix, int64_t block, const Activations& in, int64_t row, float (*sums)[kBlockOutputs]) {
  for (int part = 0; part < kParts; ++part) {
    Vector results[kRows];
    sums_of<kRows>(matrix, block, part, in, row, results);
    const int64_t place = part * kLanes;
    const Vector bias = matrix.bias ? load_floats(matrix.bias + block * kBlockOutputs + place) : Vector{};
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) store_floats(sums[r] + place, results[r] + bias);
  }
}

using BlockSums = void (*)(const Matrix&, int64_t, const Activations&, int64_t, float (*)[kBlockOutputs]);

template <size_t... kIndex>
constexpr std::array<BlockSums, sizeof...(kIndex)> block_sums_by_rows(std::index_sequence<kIndex...>) {
  return {block_sums<static_cast<int>(kIndex) + 1>...};
}

INLINE Vector activated(Vector value, int64_t activation) {
  if (activation == kGeluTanh) return gelu_tanh(value);
  if (activation == kGelu) return gelu_erf(value);
  if (activation == kSilu) return times_sigmoid(value, value);
  const Vector positive = value > 0 ? value : (value != value ? value : Vector{});
  return activation == kReluSquared ? positive * positive : positive;
}

void gate(const Mixture& mixture, int64_t activation, const float* up, float* inner, int64_t count) {
  const float alpha = static_cast<float>(mixture.alpha), limit = static_cast<float>(mixture.limit);
  for (int64_t first = 0; first < count; first += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - first);
    float gates[kLanes] = {}, others[kLanes] = {};
    for (int64_t i = 0; i < lanes; ++i) {
      gates[i] = mixture.pairs ? up[2 * (first + i)] : up[first + i];
      others[i] = mixture.pairs ? up[2 * (first + i) + 1] : up[count + first + i];
    }
    const Vector gate = load_floats(gates), other = load_floats(others);
    Vector value;
    if (alpha > 0) {
      const Vector small = at_most(gate, limit), within = -at_most(-at_most(other, limit), limit);
      value = times_sigmoid(small, alpha * small) * (within + 1);
    } else {
      value = activated(gate, activation) * other;
    }
    std::memcpy(inner + first, &value, lanes * sizeof(float));
  }
}

// Writes a block of one row; the last block of a matrix may have fewer outputs than 16.
void finish(const LinearTask& task, float* sums, const float* more, float* out, int64_t count) {
  alignas(64) float before[kBlockOutputs] = {};
  if (task.finish == Finish::kAdd) std::memcpy(before, out, count * sizeof(float));
  for (int64_t i = 0; i < kBlockOutputs; i += kLanes) {
    Vector value = load_floats(sums + i);
    if (task.finish == Finish::kAdd) value = value * task.scale + load_floats(before + i);
    if (task.finish == Finish::kActivate || task.finish == Finish::kGate) value = activated(value, task.activation);
    if (task.finish == Finish::kGate) value *= load_floats(more + i);
    store_floats(sums + i, value);
  }
  std::memcpy(out, sums, count * sizeof(float));
}

void run_block(const LinearTask& task, const Matrix& matrix, int64_t block, float* out) {
  static constexpr auto kBlockSums = block_sums_by_rows(std::make_index_sequence<kMaxRows>());
  alignas(64) float sums[kMaxRows][kBlockOutputs], more[kMaxRows][kBlockOutputs];
  const int64_t count = std::min(kBlockOutputs, matrix.outputs - block * kBlockOutputs);
  for (int64_t begin = 0; begin < task.rows; begin += kMaxRows) {
    const int64_t end = begin + tile_of(begin, task.rows).rows;
    kBlockSums[end - begin - 1](matrix, block, task.in, begin, sums);
    if (task.finish == Finish::kGate) kBlockSums[end - begin - 1]((&matrix)[1], block, task.in, begin, more);
    for (int64_t row = begin; row < end; ++row)
      finish(task, sums[row - begin], more[row - begin], out + row * task.stride + block * kBlockOutputs, count);
  }
}

void linear(const LinearTask& task, int64_t first, int64_t last) {
  int64_t before = 0;
  float* out = task.out;
  const int64_t count = task.finish == Finish::kGate ? 1 : task.count;
  for (int64_t i = 0; i < count; ++i) {
    const Matrix& matrix = task.matrices[i];
    const int64_t blocks = blocks_of(matrix);
    for (int64_t block = std::max<int64_t>(0, first - before); block < std::min(blocks, last - before); ++block)
      run_block(task, matrix, block, out);
    before += blocks;
    out += matrix.outputs;
  }
}
