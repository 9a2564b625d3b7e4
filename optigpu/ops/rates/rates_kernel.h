// The loops whose speed is a machine's own: reading, copying, and multiplying numbers that stay in registers. rates.cpp
// includes this file once for each instruction set, inside a namespace that defines
//   kLanes: numbers of 32 bits in a register
//   kSums: independent sums that fit the registers, enough that none waits for itself
//   Product, one for each kind of number: its Sum, its Operand, kOperations of one add() and add() itself

typedef int32_t Words __attribute__((vector_size(kLanes * 4)));

constexpr int kLoads = 8;                           // registers that are loaded together
constexpr int64_t kStride = kLoads * sizeof(Words);  // divides kSlice

// Every byte is loaded once in each pass. With kAhead it is asked for some pages before: hardware prefetchers stop at
// each 4 KiB page.
template <bool kAhead>
void read(const char* data, int64_t bytes, int64_t passes) {
  Words seen[kLoads] = {};
  for (int64_t pass = 0; pass < passes; ++pass) {
    for (int64_t at = 0; at < bytes; at += kStride) {
#pragma GCC unroll 8
      for (int64_t line = 0; line < kStride; line += kCacheLine)
        if (kAhead) __builtin_prefetch(data + at + kAheadBytes + line);
#pragma GCC unroll 8
      for (int i = 0; i < kLoads; ++i) {
        Words words;
        std::memcpy(&words, data + at + i * sizeof(Words), sizeof words);
        seen[i] ^= words;
      }
    }
    asm volatile("" ::: "memory");  // or a pass could be left out
  }
#pragma GCC unroll 8
  for (int i = 0; i < kLoads; ++i) UNKNOWN(seen[i]);
}

void copy(char* to, const char* from, int64_t bytes, int64_t passes) {
  for (int64_t pass = 0; pass < passes; ++pass) {
    for (int64_t at = 0; at < bytes; at += kStride)
#pragma GCC unroll 8
      for (int i = 0; i < kLoads; ++i) {
        Words words;
        std::memcpy(&words, from + at + i * sizeof(Words), sizeof words);
        std::memcpy(to + at + i * sizeof(Words), &words, sizeof words);
      }
    asm volatile("" ::: "memory");
  }
}

// kSums sums to each of which one product is added in a round. `numbers` are bytes that no compiler knows.
template <typename Product>
void multiply(const char* numbers, int64_t rounds) {
  typename Product::Sum sums[kSums];
  typename Product::Operand a, b;
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) std::memcpy(&sums[i], numbers + i, sizeof sums[i]);
  std::memcpy(&a, numbers, sizeof a);
  std::memcpy(&b, numbers, sizeof b);
  for (int64_t round = 0; round < rounds; ++round)
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      UNKNOWN(a);  // or a * b would be computed once for all rounds
      Product::add(sums[i], a, b);
    }
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) UNKNOWN(sums[i]);
}

struct Float32 {
  typedef float Sum __attribute__((vector_size(kLanes * 4)));
  typedef Sum Operand;
  static constexpr int64_t kOperations = 2 * kLanes;
  static INLINE void add(Sum& sum, Operand a, Operand b) { sum += a * b; }
};
