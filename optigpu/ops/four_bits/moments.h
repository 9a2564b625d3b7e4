// xT x of activations in bfloat16, with sums in float32, for CPUs with such products.
//
// Two tokens' numbers of an input lie side by side: one instruction adds both products to a sum. Inputs are kept by
// sides of kSide, each of which holds all tokens, so that a square of two sides reads two short streams.

constexpr int kSide = kStrip;

// packed: [sides][pairs][kSide] of two bfloat16; inputs and tokens that are missing are 0.
static void pack_side(const uint16_t* x, int64_t tokens, int64_t size, int64_t side, uint32_t* packed) {
  const int64_t pairs = (tokens + 1) / 2, first = side * kSide, count = std::min<int64_t>(kSide, size - first);
  uint32_t* to = packed + side * pairs * kSide;
  for (int64_t pair = 0; pair < pairs; ++pair, to += kSide) {
    const uint16_t* one = x + 2 * pair * size + first;
    const bool has_other = 2 * pair + 1 < tokens;
    for (int64_t at = 0; at < kSide; ++at) {
      const uint32_t low = at < count ? one[at] : 0, high = at < count && has_other ? one[size + at] : 0;
      to[at] = low | high << 16;
    }
  }
}

// Adds kRows rows of a square to `to`, of which `columns` are inside the moment.
static INLINE void add_rows(const uint32_t* rows, const uint32_t* columns, int64_t pairs, int64_t size, int64_t count,
                            int64_t rows_left, float* to) {
  __m512 sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row)
    for (int vector = 0; vector < kVectors; ++vector) sums[row][vector] = _mm512_setzero_ps();
  for (int64_t pair = 0; pair < pairs; ++pair) {
    __m512bh column[kVectors];
    for (int vector = 0; vector < kVectors; ++vector)
      column[vector] = (__m512bh)_mm512_loadu_si512(columns + pair * kSide + vector * 16);
    for (int row = 0; row < kRows; ++row) {
      const __m512bh one = (__m512bh)_mm512_set1_epi32(static_cast<int32_t>(rows[pair * kSide + row]));
      for (int vector = 0; vector < kVectors; ++vector)
        sums[row][vector] = _mm512_dpbf16_ps(sums[row][vector], one, column[vector]);
    }
  }
  for (int row = 0; row < kRows && row < rows_left; ++row)
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t left = count - vector * 16;
      const __mmask16 inside = left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1 << left) - 1);
      float* at = to + row * size + vector * 16;
      _mm512_mask_storeu_ps(at, inside, _mm512_add_ps(_mm512_maskz_loadu_ps(inside, at), sums[row][vector]));
    }
}

// The squares are counted from the first row of them to the right, then down.
static void add_square(const uint32_t* packed, int64_t pairs, int64_t size, int64_t square, float* moment) {
  int64_t row = 0, column = square;
  for (int64_t sides = (size + kSide - 1) / kSide; column >= sides - row; ++row) column -= sides - row;
  column += row;
  const uint32_t* rows = packed + row * pairs * kSide;
  const uint32_t* columns = packed + column * pairs * kSide;
  for (int64_t at = 0; at < kSide && row * kSide + at < size; at += kRows)
    add_rows(rows + at, columns, pairs, size, size - column * kSide, size - row * kSide - at,
             moment + (row * kSide + at) * size + column * kSide);
}
