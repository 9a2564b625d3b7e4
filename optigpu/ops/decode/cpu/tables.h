// Rows of packed tables: the embeddings of a token and of its position. Included once for each instruction set; see
// instruction_sets.h.
//
// Every instruction set finds what cpu/packing.py unpacks, bit by bit: a number times its scale, rounded before it is added.

constexpr int64_t kPiece = 16;  // inputs that are gathered at once; a program's width is a multiple of it

// 4 bytes of each chunk are a row's own (linear.h).
template <int64_t kChunks>
INLINE void gather(const uint8_t* from, uint32_t (&words)[kChunks]) {
#pragma GCC unroll 8
  for (int64_t c = 0; c < kChunks; ++c) std::memcpy(&words[c], from + c * kChunkBytes, sizeof words[c]);
}

INLINE void gather_fours(const uint8_t* from, int8_t (&numbers)[kPiece]) {
  uint32_t words[kPiece / 8];
  gather(from, words);
  for (int64_t c = 0; c < kPiece / 8; ++c) {
    const uint32_t halves[2] = {words[c] & 0x0f0f0f0f, words[c] >> 4 & 0x0f0f0f0f};
    std::memcpy(numbers + c * 8, halves, sizeof halves);
  }
}

INLINE void gather_uneven(const uint8_t* from, int8_t (&numbers)[kPiece]) {
  gather_fours(from, numbers);
  for (int8_t& number : numbers) number = static_cast<int8_t>(kSixteenValues[number] - kUnevenZero);
}

INLINE void gather_threes(const uint8_t* from, int8_t (&numbers)[kChunk]) {
  uint32_t words[3];  // lower bits, lower bits, third bits
  gather(from, words);
  for (int i = 0; i < kChunk; ++i) {
    const int byte = i % 4 * 8, four = i / 4;
    const uint32_t low = words[four / 4] >> (byte + 2 * (four % 4)) & 3;
    const uint32_t third = words[2] >> (byte + third_bit(four)) & 1;
    numbers[i] = static_cast<int8_t>(kEightValues[low | third << 2] - kUnevenZero);
  }
}

template <int kUpper>
INLINE void gather_with_upper(const uint8_t* from, int8_t (&numbers)[kChunk]) {
  uint32_t words[4 + kUpper];  // lower bits, then upper bits
  gather(from, words);
  for (int i = 0; i < kChunk; ++i) {
    const int byte = i % 4 * 8, four = i % (kChunk / kUpper) / 4;
    const uint32_t low = words[i / 8] >> (byte + i % 8 / 4 * 4) & 15;
    const uint32_t upper = words[4 + i * kUpper / kChunk] >> (byte + kUpper * four) & ((1 << kUpper) - 1);
    numbers[i] = static_cast<int8_t>(low | upper << 4);
  }
}

INLINE void gather_eights(const uint8_t* from, int8_t (&numbers)[kPiece]) {
  uint32_t words[kPiece / 4];
  gather(from, words);
  for (uint32_t& word : words) word ^= 0x80808080;  // 128 less each
  std::memcpy(numbers, words, sizeof words);
}

INLINE void add_floats(float* x, Vector value) {
  OPAQUE(value);  // the product is rounded before the sum, not joined with it
  store_floats(x, load_floats(x) + value);
}

template <Stored kStored>
void add_quantized_row(const Matrix& table, int64_t row, float* x) {
  constexpr int kUpper = upper_of(kStored);
  constexpr int64_t kAtOnce = kStored == Stored::kThrees || kUpper > 0 ? kChunk : kPiece;
  constexpr int64_t kChunks = kAtOnce * chunks_of(kStored) / kChunk;
  const int64_t block = row / kBlockOutputs, lane = row % kBlockOutputs;
  const uint8_t* from = table.numbers + block * (table.inputs / kAtOnce) * kChunks * kChunkBytes + lane * 4;
  const int8_t* scale = table.scale + block * (table.inputs / table.group) * kBlockOutputs + lane;
  const float unit = from_bfloat16(table.unit[row]);
  for (int64_t i = 0; i < table.inputs; i += kAtOnce, from += kChunks * kChunkBytes) {
    const int8_t multiple = scale[i / table.group * kBlockOutputs];
    const float step = multiple * unit;
    const int32_t moved = (multiple & 1) * move_of(kStored) - (is_uneven(kStored) || kStored == Stored::kEights ? 0 : zero_of(kStored));
    int8_t numbers[kAtOnce];
    if constexpr (kStored == Stored::kThrees)
      gather_threes(from, numbers);
    else if constexpr (kUpper > 0)
      gather_with_upper<kUpper>(from, numbers);
    else if constexpr (kStored == Stored::kFours)
      gather_fours(from, numbers);
    else if constexpr (kStored == Stored::kUneven)
      gather_uneven(from, numbers);
    else
      gather_eights(from, numbers);
    for (int64_t j = 0; j < kAtOnce; j += kLanes) {
      const Bits q = load_bytes(numbers + j) + moved;
      add_floats(x + i + j, __builtin_convertvector(q, Vector) * step);
    }
  }
}

void add_bfloat16_row(const Matrix& table, int64_t row, float* x) {
  constexpr int64_t kChunks = kPiece / 2;
  const int64_t block = row / kBlockOutputs, lane = row % kBlockOutputs;
  const uint8_t* from = table.numbers + block * (table.inputs / kPiece) * kChunks * kChunkBytes + lane * 4;
  for (int64_t i = 0; i < table.inputs; i += kPiece, from += kChunks * kChunkBytes) {
    uint32_t pairs[kChunks];
    gather(from, pairs);
    uint16_t numbers[kPiece];
    std::memcpy(numbers, pairs, sizeof numbers);
    for (int64_t j = 0; j < kPiece; j += kLanes) add_floats(x + i + j, load_bfloat16(numbers + j));
  }
}

void add_row(const Matrix& table, int64_t row, float* x) {
  if (table.kind == kFourBits) return add_quantized_row<Stored::kFours>(table, row, x);
  if (table.kind == kUnevenFourBits) return add_quantized_row<Stored::kUneven>(table, row, x);
  if (table.kind == kUnevenThreeBits) return add_quantized_row<Stored::kThrees>(table, row, x);
  if (table.kind == kFiveBits) return add_quantized_row<Stored::kFives>(table, row, x);
  if (table.kind == kSixBits) return add_quantized_row<Stored::kSixes>(table, row, x);
  if (table.kind == kEightBits) return add_quantized_row<Stored::kEights>(table, row, x);
  add_bfloat16_row(table, row, x);
}

// With what it has more where it is one of the finer rows.
void add_whole_row(const Matrix& table, int64_t row, float* x) {
  add_row(table, row, x);
  if (table.finer == nullptr) return;
  const int64_t *first = table.finer->rows, *last = first + table.finer->matrix.outputs;
  const int64_t* found = std::lower_bound(first, last, row);
  if (found != last && *found == row) add_row(table.finer->matrix, found - first, x);
}

void embed(const Program& program, int64_t token, int64_t position, float* x) {
  std::fill_n(x, program.width, 0.0f);
  add_whole_row(program.embedding, token, x);
  if (program.embedding_scale != 1) {
    const float scale = static_cast<float>(program.embedding_scale);
    for (int64_t i = 0; i < program.width; ++i) x[i] *= scale;
  }
  if (program.positions.outputs > 0) add_row(program.positions, position, x);
}
