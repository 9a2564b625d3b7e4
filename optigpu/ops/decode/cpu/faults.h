// Where numbers were found that are not finite.

#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

// A fault has a stamp, which grows from block to block and from pass to pass. Later ones than a thread is at do not count: one
// that is ahead may have found it, and all must answer alike.
class Faults {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  void clear() { first_.store(kNone); }
  int64_t first() const { return first_.load(); }
  bool any_up_to(int64_t stamp) const { return first_.load() <= stamp; }

  void add(int64_t stamp) {
    int64_t known = first_.load();
    while (stamp < known && !first_.compare_exchange_weak(known, stamp)) {
    }
  }

 private:
  std::atomic<int64_t> first_{kNone};
};
