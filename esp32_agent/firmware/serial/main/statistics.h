// Latencies in integer microseconds, in bounded memory: exact count, total, least and most; percentiles within 1%.
#pragma once

#include <cstdint>
#include <cstring>

namespace optigpu {

// Fewer requests bound no such percentile from above with 95% confidence (order statistics): the rule of the engine.
constexpr uint32_t kFewestP50 = 11;
constexpr uint32_t kFewestP90 = 64;
constexpr uint32_t kFewestP99 = 662;

class Statistics {
public:
    // In place: a second one would need 13 KB of the task's stack.
    void Clear() {
        std::memset(buckets_, 0, sizeof(buckets_));
        total_ = 0;
        count_ = least_ = most_ = 0;
    }

    void Add(uint32_t us) {
        least_ = count_ == 0 || us < least_ ? us : least_;
        most_ = us > most_ ? us : most_;
        total_ += us;
        ++count_;
        ++buckets_[Index(us)];
    }

    uint32_t count() const { return count_; }
    uint64_t total_us() const { return total_; }
    uint32_t min_us() const { return least_; }
    uint32_t max_us() const { return most_; }

    // The latency that `percent` of 100 requests do not exceed (nearest rank), at most 1/128 above the exact one.
    // -1 with fewer than `fewest` requests.
    int64_t Percentile(uint32_t percent, uint32_t fewest) const {
        if (count_ < fewest) {
            return -1;
        }
        const uint64_t rank = (static_cast<uint64_t>(count_) * percent + 99) / 100;
        uint64_t seen = 0;
        for (uint32_t index = 0; index < kBuckets; ++index) {
            seen += buckets_[index];
            if (seen >= rank) {
                const uint64_t upper = Upper(index);
                return upper > most_ ? most_ : static_cast<int64_t>(upper);
            }
        }
        return most_;
    }

private:
    // Values below 128 have a bucket each; above, each power of two is cut into 128 parts.
    static constexpr uint32_t kBits = 7;
    static constexpr uint32_t kParts = 1u << kBits;
    static constexpr uint32_t kBuckets = (32 - kBits + 1) * kParts;

    static uint32_t Index(uint32_t us) {
        if (us < kParts) {
            return us;
        }
        const uint32_t octave = 31 - static_cast<uint32_t>(__builtin_clz(us)) - kBits;
        return (octave + 1) * kParts + (us >> octave) - kParts;
    }

    // The largest value of a bucket.
    static uint64_t Upper(uint32_t index) {
        if (index < kParts) {
            return index;
        }
        const uint32_t octave = index / kParts - 1;
        const uint64_t part = index % kParts + kParts;
        return ((part + 1) << octave) - 1;
    }

    uint32_t buckets_[kBuckets] = {};
    uint64_t total_ = 0;
    uint32_t count_ = 0;
    uint32_t least_ = 0;
    uint32_t most_ = 0;
};

}  // namespace optigpu
