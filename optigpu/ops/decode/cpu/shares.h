// How threads share the blocks of a matrix: each begins with a part of its own, and one that has finished takes over half
// of what another has left. Memory does not serve all threads alike, and all wait for the last one some sixty times a token.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

// Blocks [first, last).
struct Stretch {
  int64_t first, last;
  int64_t size() const { return last - first; }
};

class Shares {
 public:
  // Of a product. More would not fit the 24 bits in which a block is counted: decode.cpp refuses such a program.
  static constexpr int64_t kMostBlocks = (int64_t{1} << 24) - 1;

  explicit Shares(int64_t threads) : parts_(threads) {}

  // All threads begin a product together, and none does before all have ended the last.
  void begin(int64_t id) { ++parts_[id].product; }

  // Some of `count` blocks that no other thread gets, a thread's own from the front. Empty when none are left.
  Stretch take(int64_t id, int64_t count) {
    const int64_t threads = static_cast<int64_t>(parts_.size());
    const uint64_t product = parts_[id].product & kProducts;
    Stretch found = half_of(id, product, count, true);
    for (int64_t other = 1; found.size() == 0 && other < threads; ++other)
      found = half_of((id + other) % threads, product, count, false);
    return found;
  }

 private:
  static constexpr uint64_t kProducts = 0xffff;

  struct alignas(64) Part {
    std::atomic<uint64_t> left{0};  // the product, the first and the last block in 16, 24 and 24 bits
    uint64_t product = 0;           // the owner's
  };

  static uint64_t packed(uint64_t product, Stretch left) {
    return product << 48 | static_cast<uint64_t>(left.first) << 24 | static_cast<uint64_t>(left.last);
  }

  // What is left of a part; what stands there of an earlier product is no longer true.
  Stretch left_of(int64_t id, uint64_t seen, uint64_t product, int64_t count) const {
    if (seen >> 48 == product) return {static_cast<int64_t>(seen >> 24) & kMostBlocks, static_cast<int64_t>(seen) & kMostBlocks};
    const int64_t threads = static_cast<int64_t>(parts_.size());
    return {count * id / threads, count * (id + 1) / threads};
  }

  Stretch half_of(int64_t id, uint64_t product, int64_t count, bool front) {
    std::atomic<uint64_t>& known = parts_[id].left;
    uint64_t seen = known.load(std::memory_order_relaxed);
    for (;;) {
      const Stretch left = left_of(id, seen, product, count);
      const int64_t middle = front ? left.first + (left.size() + 1) / 2 : left.first + left.size() / 2;
      const Stretch before{left.first, middle}, after{middle, left.last};
      // What the blocks' results are seen by is the barrier behind the product.
      if (known.compare_exchange_weak(seen, packed(product, front ? after : before), std::memory_order_relaxed))
        return front ? before : after;
    }
  }

  std::vector<Part> parts_;
};
