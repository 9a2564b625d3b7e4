// Kernels of one row: norm, quantization, the choice of a token. Included once for each instruction set; see
// instruction_sets.h.

// Rows that are multiplied together, and whose numbers lie together.
struct Tile {
  int64_t first, rows;
};

INLINE Tile tile_of(int64_t row, int64_t rows) {
  const int64_t first = row / kMaxRows * kMaxRows;
  return {first, std::min<int64_t>(kMaxRows, rows - first)};
}

INLINE Vector load_floats(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

INLINE void store_floats(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

INLINE Vector load_bfloat16(const uint16_t* from) { return float_of(load_halves(from) << 16); }

INLINE float sum_of(Vector value) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += value[i];
  return sum;
}

// Combines the numbers of a register, a quarter of them at a time: one by one takes three times as long.
template <typename Numbers, typename Combine>
INLINE auto combined(Numbers numbers, const Combine& combine) {
  using Number = std::remove_reference_t<decltype(numbers[0])>;
  typedef Number Four __attribute__((vector_size(16)));
  Four parts[kLanes / 4];
  std::memcpy(parts, &numbers, sizeof parts);
#pragma GCC unroll 4
  for (int i = 1; i < kLanes / 4; ++i) parts[0] = combine(parts[0], parts[i]);
  typedef int32_t Order __attribute__((vector_size(16)));
  parts[0] = combine(parts[0], __builtin_shuffle(parts[0], Order{2, 3, 0, 1}));
  parts[0] = combine(parts[0], __builtin_shuffle(parts[0], Order{1, 0, 3, 2}));
  return parts[0][0];
}

// Lanes of two registers, one after the other: every second stretch of `apart` lanes, from `first` on. Or of one register: those
// that are `apart` lanes apart.
struct Lanes {
  int32_t lane[kLanes];
  static constexpr Lanes halves(int apart, int first) {
    Lanes made{};
    for (int i = 0; i < kLanes; ++i) made.lane[i] = i / apart * 2 * apart + i % apart + first;
    return made;
  }
  static constexpr Lanes others(int apart) {
    Lanes made{};
    for (int i = 0; i < kLanes; ++i) made.lane[i] = i ^ apart;
    return made;
  }
};

INLINE Bits order_of(const Lanes& lanes) {
  Bits order;
  std::memcpy(&order, lanes.lane, sizeof order);
  return order;
}

// Each kSpan lanes have the result of their numbers.
template <int kSpan, typename Numbers, typename Combine>
INLINE Numbers combined_within(Numbers numbers, const Combine& combine) {
  if constexpr (kSpan == 1) {
    return numbers;
  } else {
    static constexpr Lanes kOthers = Lanes::others(kSpan / 2);
    return combined_within<kSpan / 2>(combine(numbers, __builtin_shuffle(numbers, order_of(kOthers))), combine);
  }
}

// Combines the numbers of several registers, each its own: lane i has the result of register i / (kLanes / kCount).
template <size_t kCount, int kSpan = kLanes, typename Numbers, typename Combine>
INLINE Numbers combined_each(const Numbers (&numbers)[kCount], const Combine& combine) {
  if constexpr (kCount == 1) {
    return combined_within<kSpan>(numbers[0], combine);
  } else {
    static constexpr Lanes kFirst = Lanes::halves(kSpan / 2, 0), kSecond = Lanes::halves(kSpan / 2, kSpan / 2);
    Numbers pairs[kCount / 2];
#pragma GCC unroll 8
    for (size_t i = 0; i < kCount / 2; ++i)
      pairs[i] = combine(__builtin_shuffle(numbers[2 * i], numbers[2 * i + 1], order_of(kFirst)),
                         __builtin_shuffle(numbers[2 * i], numbers[2 * i + 1], order_of(kSecond)));
    return combined_each<kCount / 2, kSpan / 2>(pairs, combine);
  }
}

INLINE float largest_of(Vector value) {
  return combined(value, [](auto a, auto b) { return b > a ? b : a; });
}

INLINE int32_t largest_of(Bits value) {
  return combined(value, [](auto a, auto b) { return b > a ? b : a; });
}

INLINE int32_t sum_of(Bits value) {
  return combined(value, [](auto a, auto b) { return a + b; });
}

bool norm(const Norm& norm, const float* x, float* h, int64_t width) {
  constexpr int kSums = 4;  // an addition takes 4 cycles
  float mean = 0;
  if (norm.kind == kLayerNorm) {
    Vector sums[kSums] = {};
    for (int64_t i = 0; i < width; i += kLanes) sums[i / kLanes % kSums] += load_floats(x + i);
    mean = sum_of((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(width);
  }
  Vector squares[kSums] = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vector apart = load_floats(x + i) - mean;
    squares[i / kLanes % kSums] += apart * apart;
  }
  const float variance = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(width);
  if (!std::isfinite(variance)) return false;
  const float scale = 1 / std::sqrt(variance + static_cast<float>(norm.epsilon));
  for (int64_t i = 0; i < width; i += kLanes) {
    const Vector value = (load_floats(x + i) - mean) * scale * load_floats(norm.weight + i);
    store_floats(h + i, norm.bias ? value + load_floats(norm.bias + i) : value);
  }
  return true;
}

// The sum of of(x) over all numbers, a register at a time.
template <typename Of>
INLINE float sum_over(const float* x, int64_t count, const Of& of) {
  const int64_t whole = count / kLanes * kLanes;
  Vector sums = {};
  for (int64_t i = 0; i < whole; i += kLanes) sums += of(load_floats(x + i));
  float sum = sum_of(sums);
  for (int64_t i = whole; i < count; ++i) sum += of(x[i]);
  return sum;
}

bool norm_some(const Norm& norm, float* x, int64_t count) {
  const float all = static_cast<float>(count);
  const float mean = norm.kind == kLayerNorm ? sum_over(x, count, [](auto value) { return value; }) / all : 0;
  const float variance = sum_over(x, count, [mean](auto value) { return (value - mean) * (value - mean); }) / all;
  if (!std::isfinite(variance)) return false;
  const float scale = 1 / std::sqrt(variance + static_cast<float>(norm.epsilon));
  for (int64_t i = 0; i < count; ++i)
    x[i] = (x[i] - mean) * scale * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
  return true;
}

// cap * tanh(x / cap), as 1 - 2 / (1 + exp(2 x / cap)) of the magnitude.
INLINE Vector capped(Vector x, float cap) {
  const Vector e = exp_of(-at_most(magnitude(x) * (2 / cap), kFar), Vector{});
  const Vector size = cap * ((1 - e) / (1 + e));
  return x < 0 ? -size : size;
}

void cap(float* x, int64_t count, float cap) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - i);
    Vector value = {};
    std::memcpy(&value, x + i, lanes * sizeof(float));
    value = capped(value, cap);
    std::memcpy(x + i, &value, lanes * sizeof(float));
  }
}

bool quantize(const float* x, int64_t inputs, int64_t group, int64_t row, int64_t rows, const Activations& to) {
  constexpr float kRound = 0x1.8p23f;  // a sum with it has no fraction, and its last bits are the whole number
  const Tile tile = tile_of(row, rows);
  int8_t* q = to.q + tile.first * inputs + (row - tile.first) * group;
  const int64_t first = tile.first * (inputs / group) + row - tile.first;
  float* step = to.step + first;
  int32_t* less = to.less + first;
  for (int64_t g = 0; g * group < inputs; ++g, x += group, q += tile.rows * group) {
    Bits most = {};  // of the magnitudes' bits, among which NaN is larger than infinity
    for (int64_t i = 0; i < group; i += kLanes) {
      const Bits size = bits_of(load_floats(x + i)) & 0x7fffffff;
      most = size > most ? size : most;
    }
    const int32_t bits = largest_of(most);
    if (bits >= 0x7f800000) return false;
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const float inverse = largest > 0x1p-120f ? 127 / largest : 0;
    step[g * tile.rows] = inverse == 0 ? 0 : largest / 127;
    Bits total = {};
    for (int64_t i = 0; i < group; i += kLanes) {
      Vector scaled = load_floats(x + i) * inverse;
      OPAQUE(scaled);  // the product is rounded before the sum, not joined with it
      const Bits whole = bits_of(scaled + kRound) - 0x4b400000;
      total += whole;
      store_bytes(q + i, whole);
    }
    less[g * tile.rows] = -kFoursZero * sum_of(total);
  }
  return true;
}

int64_t largest(const float* x, int64_t count) {
  Vector most = filled(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector value = load_floats(x + i);
    most = value > most ? value : most;
  }
  float found = largest_of(most);
  for (; i < count; ++i) found = x[i] > found ? x[i] : found;
  for (i = 0; i < count; ++i)
    if (x[i] == found) return i;
  return 0;
}

int64_t drawn(const float* x, int64_t count, float temperature, double point, float* scratch) {
  const float most = x[largest(x, count)], inverse = 1 / temperature;
  double total = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - i);
    Vector value = filled(most);
    std::memcpy(&value, x + i, lanes * sizeof(float));
    value = exp_of(-at_most((most - value) * inverse, kFar), Vector{});
    std::memcpy(scratch + i, &value, lanes * sizeof(float));
    for (int64_t j = 0; j < lanes; ++j) total += value[j];
  }
  double left = point * total;
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (scratch[i] == 0) continue;
    last = i;
    left -= scratch[i];
    if (left < 0) break;
  }
  return last;
}
