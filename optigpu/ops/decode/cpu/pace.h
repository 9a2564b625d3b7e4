// How many guesses are worth their time, from what the guesses so far have cost and saved.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

// Seconds that right guesses save pay for wrong ones; besides these, guessing may cost kShare of the time of plain decoding and
// kStart passes of a text. So text that cannot be guessed takes little longer, and it is tried now and then whether it still cannot.
class Pace {
 public:
  explicit Pace(int64_t kinds) : tries_(kinds), hits_(kinds) { begin(); }

  // Another text; what a pass takes is still known.
  void begin() {
    std::fill(tries_.begin(), tries_.end(), 4.0);
    std::fill(hits_.begin(), hits_.end(), 3.0);
    saved_ = kStart * plain_;
  }

  // How many guesses of a kind to verify next, `most` at the most.
  int64_t guesses(int64_t kind, int64_t most) const {
    if (samples_ < kSamples || most < 1) return 0;
    const double right = hits_[kind] / tries_[kind];
    int64_t count = 0;
    for (double chance = right; count < most && chance * plain_ > extra_; chance *= right) ++count;
    const double affordable = saved_ / extra_;
    return std::min(std::max<int64_t>(1, count), static_cast<int64_t>(std::min(affordable, 1e6)));
  }

  // A pass with `guessed` guesses of a kind, of which the first `right` were right, took so many seconds.
  void learn(int64_t kind, int64_t guessed, int64_t right, double seconds) {
    if (guessed == 0) return learn_plain(seconds);
    const double each = std::max((seconds - plain_) / static_cast<double>(guessed), 0.01 * plain_);
    extra_ += (std::min(each, 4 * extra_) - extra_) / 4;
    tries_[kind] = kKept * tries_[kind] + static_cast<double>(std::min(right + 1, guessed));
    hits_[kind] = kKept * hits_[kind] + static_cast<double>(right);
    const double plainly = static_cast<double>(right + 1) * plain_;
    saved_ = std::min(saved_ + (1 + kShare) * plainly - seconds, kMost * plain_);
  }

 private:
  static constexpr int kSamples = 2;    // passes without a guess before the first guess
  static constexpr double kStart = 1, kMost = 4;  // in passes
  static constexpr double kShare = 0.015;
  static constexpr double kKept = 0.9;  // of what earlier guesses count

  // The least of the first ones, since the machine may have done something else as well; later ones count little.
  void learn_plain(double seconds) {
    if (samples_ < kSamples) {
      plain_ = samples_ == 0 ? seconds : std::min(plain_, seconds);
      extra_ = plain_ / 4;
      saved_ = kStart * plain_;
      ++samples_;
      return;
    }
    plain_ += (std::min(seconds, 2 * plain_) - plain_) / (seconds < plain_ ? 2 : 8);
    saved_ = std::min(saved_ + kShare * plain_, kMost * plain_);
  }

  std::vector<double> tries_, hits_;  // of each kind's guesses
  double plain_ = 0;                  // seconds of a pass without guesses
  double extra_ = 0;                  // seconds more for each guess
  double saved_ = 0;
  int samples_ = 0;
};
