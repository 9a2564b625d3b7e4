// Who guesses the next tokens of a text: the text itself, or a smaller decoder.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engine.h"

class Guesser {
 public:
  virtual ~Guesser() = default;
  // Another text begins, of `known` tokens, the last of which came from the first ones. False where numbers are not finite.
  virtual bool begin(const int64_t* text, int64_t known) = 0;
  // How sure it is of what follows, from 0 to kinds() - 1; -1 where it has no guess.
  virtual int64_t kind(const int64_t* text, int64_t known) = 0;
  // Up to `most` tokens that may follow; how many. After `kind` for the same text.
  virtual int64_t guess(const int64_t* text, int64_t known, int64_t most, int64_t* guesses) = 0;
  virtual int64_t kinds() const = 0;
};

// Guesses what followed the last tokens when they were last seen in the text, the longest match of at most `ngram` first.
//
// A table has for a hash of some tokens where the text went on after them. What stands there of others is compared, and an entry
// that another has taken is a guess less.
class Lookup : public Guesser {
 public:
  explicit Lookup(int64_t ngram) : ngram_(ngram), table_(kEntries) {}

  bool begin(const int64_t*, int64_t) override {
    std::fill(table_.begin(), table_.end(), 0);
    learned_ = 0;
    return true;
  }

  int64_t kind(const int64_t* text, int64_t known) override {
    learn(text, known);
    for (int64_t size = std::min(ngram_, known - 1); size > 0; --size) {
      next_ = entry(text + known, size);
      if (next_ >= size && std::equal(text + known - size, text + known, text + next_ - size)) return size - 1;
    }
    return -1;
  }

  // Where the text ends, it goes on as it does after the match: a short loop is guessed as often as it comes.
  int64_t guess(const int64_t* text, int64_t known, int64_t most, int64_t* guesses) override {
    for (int64_t i = 0; i < most; ++i) guesses[i] = next_ + i < known ? text[next_ + i] : guesses[next_ + i - known];
    return most;
  }

  int64_t kinds() const override { return ngram_; }

 private:
  static constexpr int kBits = 16;  // of an index; a text of more tokens forgets some of its matches
  static constexpr int64_t kEntries = int64_t{1} << kBits;

  // All that the text went on after, before its last token.
  void learn(const int64_t* text, int64_t known) {
    for (learned_ = std::max<int64_t>(learned_, 1); learned_ < known; ++learned_)
      for (int64_t size = 1; size <= std::min(ngram_, learned_); ++size) entry(text + learned_, size) = learned_;
  }

  // Of the `size` tokens before `end`.
  int64_t& entry(const int64_t* end, int64_t size) {
    uint64_t hash = static_cast<uint64_t>(size);
    for (int64_t i = 1; i <= size; ++i) hash = (hash ^ static_cast<uint64_t>(end[-i])) * 0x9e3779b97f4a7c15;
    return table_[hash >> (64 - kBits)];
  }

  const int64_t ngram_;
  std::vector<int64_t> table_;
  int64_t learned_ = 0, next_ = 0;
};

// Guesses greedily with another decoder's engine, in the first sequence of its cache.
class Draft : public Guesser {
 public:
  explicit Draft(Engine& engine) : engine_(engine), logits_(engine.program().vocabulary) {}

  bool begin(const int64_t* text, int64_t known) override {
    cached_.clear();
    return run(text, std::min(known - 1, engine_.room()), false);
  }

  int64_t kind(const int64_t*, int64_t known) override { return known < engine_.room() ? 0 : -1; }

  int64_t guess(const int64_t* text, int64_t known, int64_t most, int64_t* guesses) override {
    const int64_t count = std::min(most, engine_.room() - known + 1);
    text_.assign(text, text + known);
    for (int64_t i = 0; i < count; ++i) {
      if (!run(text_.data(), known + i, true)) return i;
      guesses[i] = chosen_;
      text_.push_back(chosen_);
    }
    return count;
  }

  int64_t kinds() const override { return 1; }

 private:
  // Runs what the cache lacks of the text's first `count` tokens, the last of them always; what it has of another text is replaced.
  bool run(const int64_t* text, int64_t count, bool wanted) {
    const int64_t most = std::min<int64_t>(cached_.size(), std::max<int64_t>(0, count - 1));
    const int64_t same = std::mismatch(cached_.begin(), cached_.begin() + most, text).first - cached_.begin();
    if (count == same) return true;
    sequence_.assign(count - same, 0);
    wanted_.assign(count - same, 0);
    wanted_.back() = wanted;
    position_.clear();
    for (int64_t position = same; position < count; ++position) position_.push_back(position);
    cached_.assign(text, text + count);
    const Rows rows{count - same, text + same, sequence_.data(), position_.data(), wanted_.data(), &chosen_, logits_.data()};
    return engine_.advance(rows) == Faults::kNone;
  }

  Engine& engine_;
  std::vector<float> logits_;
  std::vector<int64_t> cached_, text_, sequence_, position_;
  std::vector<uint8_t> wanted_;
  int64_t chosen_ = 0;
};
