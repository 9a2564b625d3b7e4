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
