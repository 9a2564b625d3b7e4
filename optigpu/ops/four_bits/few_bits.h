// The loops of few_bits.cpp for one instruction set. Included once for each, inside a namespace that defines kLanes
// (floats in a vector register).

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t Bits __attribute__((vector_size(kLanes * sizeof(int32_t))));

static INLINE Vector load(const float* from) {
  Vector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

static INLINE void store(float* to, Vector value) { std::memcpy(to, &value, sizeof value); }

// The first `count` floats, and ones.
static INLINE Vector load_some(const float* from, int64_t count) {
  float whole[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) whole[lane] = lane < count ? from[lane] : 1;
  return load(whole);
}

static INLINE Vector filled(float value) { return Vector{} + value; }

// NaN lies past all values, as torch.bucketize has it.
static INLINE Vector nearest(const Values& values, Vector x) {
  Vector found = filled(values.value[0]);
  for (int64_t next = 1; next < values.count; ++next)
    found += values.between[next] >= x ? Vector{} : filled(values.step[next]);
  return found;
}

static INLINE Vector number(const Values& values, Vector x) {
  Vector found{};
  for (int64_t next = 1; next < values.count; ++next) found += values.between[next] >= x ? Vector{} : filled(1);
  return found;
}

// Evenly spaced ones: a sum with kRound has no fraction.
static INLINE Vector nearest_even(float least, Vector x) {
  constexpr float kRound = 0x1.8p23f;
  x = x < least ? filled(least) : x;
  x = x > -1 - least ? filled(-1 - least) : x;
  return (x + kRound) - kRound;
}

// Each operation is rounded by itself, as torch's are.
static INLINE Vector squared_error(const Values& values, Vector weight, Vector scale) {
  Vector rounded = nearest(values, weight / scale) * scale;
  UNKNOWN(rounded);
  const Vector error = rounded - weight;
  return error * error;
}

struct SquaredErrors {
  static INLINE void put(const Groups& groups, int64_t at, int64_t count, Vector weight, Vector scale) {
    const Vector found = squared_error(groups.values, weight, scale);
    std::memcpy(static_cast<float*>(groups.found) + at, &found, count * sizeof(float));
  }
};

struct Numbers {
  static INLINE void put(const Groups& groups, int64_t at, int64_t count, Vector weight, Vector scale) {
    const Vector found = number(groups.values, weight / scale);
    for (int64_t lane = 0; lane < count; ++lane)
      static_cast<uint8_t*>(groups.found)[at + lane] = static_cast<uint8_t>(found[lane]);
  }
};

// What a vector does not hold of a group is filled up with ones.
template <typename What>
static void over_groups(const Groups& groups, int64_t first, int64_t last) {
  for (int64_t group = first; group < last; ++group) {
    const Vector scale = filled(groups.scale[group]);
    const int64_t end = (group + 1) * groups.size;
    int64_t at = group * groups.size;
    for (; at + kLanes <= end; at += kLanes) What::put(groups, at, kLanes, load(groups.weight + at), scale);
    if (at < end) What::put(groups, at, end - at, load_some(groups.weight + at, end - at), scale);
  }
}

static void squared_errors(const Groups& groups, int64_t first, int64_t last) {
  over_groups<SquaredErrors>(groups, first, last);
}

static void numbers(const Groups& groups, int64_t first, int64_t last) { over_groups<Numbers>(groups, first, last); }
