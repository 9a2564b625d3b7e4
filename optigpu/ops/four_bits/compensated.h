// Rounding, with compensation as in compensated.py or without, for one strip of outputs after the other: outputs know
// nothing of each other, so that a strip's weights, numbers and errors stay in a core's caches, and no thread waits for
// another. Included after few_bits.h, once for each instruction set.

constexpr int kVectors = 4, kStrip = kVectors * kLanes;
constexpr int kRows = kLanes == 16 ? 4 : 2;  // of a product at once: its sums stay in registers
constexpr int64_t kDeep = 128;               // inputs of a product at once: their errors stay in the first cache

typedef Vector Strip[kVectors];  // a number of each output

// Products of float32 numbers; an input's errors are one Strip.
struct Floats {
  using Number = float;
  static constexpr int kTogether = 1;
  static INLINE Vector spread(const float* from) { return filled(*from); }
  static INLINE Vector add(Vector sum, Vector one, Vector other) { return sum + one * other; }
  static INLINE Vector joined(const Vector* errors) { return errors[0]; }
};

#ifdef HAS_HALVES
// Of bfloat16 numbers with float32 sums; two inputs' errors lie side by side in a Strip.
struct Halves {
  using Number = uint16_t;
  static constexpr int kTogether = 2;
  static INLINE Vector spread(const uint16_t* from) {
    int32_t both;
    std::memcpy(&both, from, sizeof both);
    return (Vector)_mm512_set1_epi32(both);
  }
  static INLINE Vector add(Vector sum, Vector one, Vector other) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)one, (__m512bh)other);
  }
  static INLINE Vector joined(const Vector* errors) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)errors[0]));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)errors[1]));
    return (Vector)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }
};
#endif

static INLINE void load_strip(const float* from, Strip& to) {
  for (int v = 0; v < kVectors; ++v) to[v] = load(from + v * kLanes);
}

static INLINE void store_strip(float* to, const Strip& from) {
  for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, from[v]);
}

// sums[row] += a matrix's row times the first `inputs` errors, for `rows` rows.
template <typename Products>
static INLINE void add_products(const typename Products::Number* matrix, int64_t stride, int64_t rows, int64_t inputs,
                                const float* errors, Strip* sums) {
  for (int64_t from = 0; from < inputs; from += kDeep) {
    const int64_t to = std::min(inputs, from + kDeep);
    for (int64_t row = 0; row < rows; row += kRows) {
      const auto* first = matrix + row * stride;
      Vector found[kRows][kVectors];
      for (int r = 0; r < kRows; ++r) {
        for (int64_t next = to; next < to + kDeep; next += 64 / sizeof(*first))
          __builtin_prefetch(first + r * stride + next);
        for (int v = 0; v < kVectors; ++v) found[r][v] = sums[row + r][v];
      }
      for (int64_t input = from; input < to; input += Products::kTogether) {
        Strip error;
        load_strip(errors + input / Products::kTogether * kStrip, error);
        for (int r = 0; r < kRows; ++r) {
          const Vector one = Products::spread(first + r * stride + input);
          for (int v = 0; v < kVectors; ++v) found[r][v] = Products::add(found[r][v], one, error[v]);
        }
      }
      for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) sums[row + r][v] = found[r][v];
    }
  }
}

// What a strip has: weights, values and errors [inputs, kStrip], scales [groups, kStrip], units [kStrip].
struct Held {
  float *weight, *value, *errors, *scale, *unit;

  Held(const Compensated& all, float* room)
      : weight(room),
        value(weight + all.inputs * kStrip),
        errors(value + all.inputs * kStrip),
        scale(errors + all.inputs * kStrip),
        unit(scale + all.inputs / all.size * kStrip) {}
};

// Outputs that are missing have weights of 0.
static void take_strip(const Compensated& all, int64_t first, const Held& held) {
  const int64_t count = std::min<int64_t>(kStrip, all.outputs - first);
  for (int64_t at = 0; at < kStrip; ++at) held.unit[at] = at < count ? all.unit[first + at] : 1;
  for (int64_t from = 0; from < all.inputs; from += kLanes)
    for (int64_t at = 0; at < kStrip; ++at)
      for (int64_t input = from; input < std::min<int64_t>(from + kLanes, all.inputs); ++input)
        held.weight[input * kStrip + at] = at < count ? all.weight[(first + at) * all.inputs + input] : 0;
}

static INLINE Vector whole(Vector x) {
  constexpr float kRound = 0x1.8p23f;  // a sum with it has no fraction
  return (x + kRound) - kRound;
}

// 1 where a scale is an odd multiple of the unit, else 0.
static INLINE Vector parity(Vector scale, Vector unit) {
  const Vector multiple = whole(scale / unit);
  return whole(multiple / 2) * 2 == multiple ? Vector{} : filled(1);
}

static INLINE Vector moved_by(const Compensated& all, Vector scale, Vector unit) { return parity(scale, unit) * all.move; }

static void give_strip(const Compensated& all, int64_t first, const Held& held) {
  const int64_t count = std::min<int64_t>(kStrip, all.outputs - first), groups = all.inputs / all.size;
  for (int64_t at = 0; at < all.inputs * kStrip; at += kLanes) {
    const Vector value = load(held.value + at);
    if (all.values.count == 0) {
      store(held.value + at, value - all.least);
    } else {
      const Vector scale = load(held.scale + at / kStrip / all.size * kStrip + at % kStrip);
      store(held.value + at, number(all.values, value - moved_by(all, scale, load(held.unit + at % kStrip))));
    }
  }
  for (int64_t from = 0; from < all.inputs; from += kLanes)
    for (int64_t at = 0; at < count; ++at)
      for (int64_t input = from; input < std::min<int64_t>(from + kLanes, all.inputs); ++input)
        all.numbers[(first + at) * all.inputs + input] = static_cast<uint8_t>(held.value[input * kStrip + at]);
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t at = 0; at < count; ++at)
      all.scale[(first + at) * groups + group] =
          static_cast<int8_t>(std::nearbyint(held.scale[group * kStrip + at] / held.unit[at]));
}

// A multiple of the unit from 1 to 127 with either sign; of uneven values an odd or even one, where `odd` is 1 or 0.
template <bool kIsEven>
static INLINE Vector stored_scale(Vector scale, Vector unit, Vector odd) {
  constexpr float kStep = kIsEven ? 1 : 2;
  const Vector first = kIsEven ? Vector{} : odd, most = first + (kLargestScale + 1 - kStep);
  Vector multiple = whole((scale / unit - first) / kStep) * kStep + first;
  multiple = multiple < -most ? -most : multiple;
  multiple = multiple > most ? most : multiple;
  return (multiple == 0 ? filled(kStep) : multiple) * unit;
}

template <bool kIsEven>
static INLINE Vector value_of(const Compensated& all, Vector asked, Vector moved) {
  return kIsEven ? nearest_even(all.least, asked) : nearest(all.values, asked - moved) + moved;
}

static INLINE Vector absolute(Vector x) { return x < 0 ? -x : x; }

// The scale of evenly spaced values: quantize.py's of "min_max", then better ones by least squares.
static INLINE Vector even_scale(const Compensated& all, const Strip* left, int v, Vector largest, Vector unit) {
  const Vector begun = stored_scale<true>(largest / all.least, unit, Vector{}), step = 1 / begun;
  Vector scale = begun, best = begun, least = filled(__builtin_inff());
  for (int64_t tried = 0; tried < all.steps; ++tried) {
    Vector loss{}, shared{}, size{};
    const Vector inverse = 1 / scale;
    for (int64_t input = 0; input < all.size; ++input) {
      const Vector weight = left[input][v], value = nearest_even(all.least, weight * inverse);
      const Vector error = absolute((weight - value * scale) * step);
      loss += error * error * error, shared += weight * value, size += value * value;
    }
    best = loss < least ? scale : best;
    least = loss < least ? loss : least;
    const Vector fitted = shared / size;
    scale = (size > 0) & (fitted != 0) ? stored_scale<true>(fitted, unit, Vector{}) : scale;
  }
  return best;
}

// That of uneven values: the best of those that are tried.
static INLINE Vector uneven_scale(const Compensated& all, const Strip* left, int v, Vector largest, Vector unit) {
  Vector best = largest, least = filled(__builtin_inff());
  for (int64_t tried = 0; tried < 2 * all.tried; ++tried) {
    const Vector odd = filled(tried < all.tried ? 0 : 1), moved = odd * all.move;
    const Vector scale = stored_scale<false>(largest * all.shares[tried % all.tried], unit, odd), inverse = 1 / scale;
    Vector loss{};
    for (int64_t input = 0; input < all.size; ++input) {
      const Vector error = value_of<false>(all, left[input][v] * inverse, moved) * scale - left[input][v];
      loss += error * error;
    }
    best = loss < least ? scale : best;
    least = loss < least ? loss : least;
  }
  return best;
}

template <bool kIsEven>
static INLINE void find_scale(const Compensated& all, const Strip* left, const float* unit, Strip& scale) {
  for (int v = 0; v < kVectors; ++v) {
    Vector largest = left[0][v];
    for (int64_t input = 1; input < all.size; ++input)
      largest = absolute(left[input][v]) > absolute(largest) ? left[input][v] : largest;
    const Vector units = load(unit + v * kLanes);
    scale[v] = kIsEven ? even_scale(all, left, v, largest, units) : uneven_scale(all, left, v, largest, units);
  }
}

template <typename Products>
static INLINE void put_errors(const Compensated& all, int64_t start, const Held& held, const Strip& scale) {
  for (int64_t input = start; input < start + all.size; input += Products::kTogether)
    for (int v = 0; v < kVectors; ++v) {
      Vector error[Products::kTogether];
      for (int next = 0; next < Products::kTogether; ++next) {
        const int64_t at = (input + next) * kStrip + v * kLanes;
        error[next] = load(held.weight + at) - load(held.value + at) * scale[v];
      }
      store(held.errors + input / Products::kTogether * kStrip + v * kLanes, Products::joined(error));
    }
}

// A group's numbers where nothing is known of its inputs.
template <bool kIsEven>
static void round_group(const Compensated& all, int64_t group, const Held& held) {
  const int64_t start = group * all.size;
  Strip left[kMostInputs], scale;
  for (int64_t input = 0; input < all.size; ++input) load_strip(held.weight + (start + input) * kStrip, left[input]);
  find_scale<kIsEven>(all, left, held.unit, scale);
  for (int v = 0; v < kVectors; ++v) {
    const Vector step = 1 / scale[v], moved = moved_by(all, scale[v], load(held.unit + v * kLanes));
    for (int64_t input = 0; input < all.size; ++input)
      store(held.value + (start + input) * kStrip + v * kLanes, value_of<kIsEven>(all, left[input][v] * step, moved));
  }
  store_strip(held.scale + group * kStrip, scale);
}

// The first numbers of a group: later inputs take back what they can of each error, as in GPTQ.
template <typename Products, bool kIsEven>
static void begin_group(const Compensated& all, int64_t group, const Held& held) {
  const int64_t size = all.size, start = group * size;
  const float* inverse = all.inverse + group * size * size;
  Strip carried[kMostInputs] = {}, left[kMostInputs], scale, step, moved;
  add_products<Products>(static_cast<const typename Products::Number*>(all.factor) + start * all.inputs, all.inputs,
                         size, start, held.errors, carried);
  for (int64_t input = 0; input < size; ++input) load_strip(held.weight + (start + input) * kStrip, left[input]);
  for (int64_t input = 0; input < size; ++input)
    for (int64_t later = input; later < size; ++later)
      for (int v = 0; v < kVectors; ++v) left[later][v] += inverse[input * size + later] * carried[input][v];
  find_scale<kIsEven>(all, left, held.unit, scale);
  for (int v = 0; v < kVectors; ++v)
    step[v] = 1 / scale[v], moved[v] = moved_by(all, scale[v], load(held.unit + v * kLanes));
  for (int64_t input = 0; input < size; ++input) {
    const float* coupling = inverse + input * size;
    const float own = 1 / coupling[input];
    Strip change;
    for (int v = 0; v < kVectors; ++v) {
      const Vector value = value_of<kIsEven>(all, left[input][v] * step[v], moved[v]);
      store(held.value + (start + input) * kStrip + v * kLanes, value);
      change[v] = (left[input][v] - value * scale[v]) * own;
    }
    for (int64_t later = input + 1; later < size; ++later)
      for (int v = 0; v < kVectors; ++v) left[later][v] -= coupling[later] * change[v];
  }
  store_strip(held.scale + group * kStrip, scale);
  put_errors<Products>(all, start, held, scale);
}

// A better scale by least squares, unless all values are 0; `pull` becomes what it is with that. Values stay moved, or not.
template <bool kIsEven>
static INLINE void improve_scale(const Compensated& all, const float* own, const float* value, const float* unit,
                                 Strip* pull, Strip& scale) {
  Strip moved[kMostInputs] = {}, size = {}, shared = {};
  add_products<Floats>(own, all.size, all.size, all.size, value, moved);
  for (int64_t input = 0; input < all.size; ++input)
    for (int v = 0; v < kVectors; ++v) {
      const Vector each = load(value + input * kStrip + v * kLanes);
      size[v] += moved[input][v] * each, shared[v] += pull[input][v] * each;
    }
  for (int v = 0; v < kVectors; ++v) {
    const Vector old = scale[v], better = size[v] > 0 ? old + shared[v] / size[v] : old;
    const Vector units = load(unit + v * kLanes);
    scale[v] = stored_scale<kIsEven>(better, units, parity(old, units));
    for (int64_t input = 0; input < all.size; ++input) pull[input][v] += moved[input][v] * (old - scale[v]);
  }
}

// Each number of a group becomes the best one while all others are fixed.
template <typename Products, bool kIsEven>
static void improve_group(const Compensated& all, int64_t group, const Held& held) {
  const int64_t size = all.size, start = group * size;
  const float* own = all.own + group * size * size;
  float* values = held.value + start * kStrip;
  Strip pull[kMostInputs] = {}, scale, step, moved;
  // Half of what the loss falls by when a weight grows a bit: of the errors as all other groups have left them.
  add_products<Products>(static_cast<const typename Products::Number*>(all.moment) + start * all.inputs, all.inputs,
                         size, all.inputs, held.errors, pull);
  load_strip(held.scale + group * kStrip, scale);
  improve_scale<kIsEven>(all, own, values, held.unit, pull, scale);
  for (int v = 0; v < kVectors; ++v)
    step[v] = 1 / scale[v], moved[v] = moved_by(all, scale[v], load(held.unit + v * kLanes));
  for (int64_t input = 0; input < size; ++input) {
    const float* coupling = own + input * size;
    const float alone = 1 / coupling[input];
    Strip change;
    for (int v = 0; v < kVectors; ++v) {
      float* at = values + input * kStrip + v * kLanes;
      const Vector before = load(at);
      const Vector value = value_of<kIsEven>(all, before + pull[input][v] * alone * step[v], moved[v]);
      store(at, value);
      change[v] = (value - before) * scale[v];
    }
    for (int64_t later = input + 1; later < size; ++later)
      for (int v = 0; v < kVectors; ++v) pull[later][v] -= coupling[later] * change[v];
  }
  store_strip(held.scale + group * kStrip, scale);
  put_errors<Products>(all, start, held, scale);
}

template <typename Products, bool kIsEven>
static void round_strip(const Compensated& all, int64_t first, float* room) {
  const Held held(all, room);
  const int64_t groups = all.inputs / all.size;
  take_strip(all, first, held);
  for (int64_t group = 0; group < groups; ++group) {
    if (all.moment == nullptr)
      round_group<kIsEven>(all, group, held);
    else
      begin_group<Products, kIsEven>(all, group, held);
  }
  for (int64_t round = 0; round < (all.moment == nullptr ? 0 : all.rounds); ++round)
    for (int64_t group = 0; group < groups; ++group) improve_group<Products, kIsEven>(all, group, held);
  give_strip(all, first, held);
}

template <typename Products>
static void compensated_by(const Compensated& all, int64_t first, float* room) {
  if (all.values.count == 0)
    round_strip<Products, true>(all, first, room);
  else
    round_strip<Products, false>(all, first, room);
}

// kStrip outputs from `first` on.
static void compensated(const Compensated& all, int64_t first, float* room) {
#ifdef HAS_HALVES
  if (all.has_halves) return compensated_by<Halves>(all, first, room);
#endif
  compensated_by<Floats>(all, first, room);
}
