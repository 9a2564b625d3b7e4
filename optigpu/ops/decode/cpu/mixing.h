// Which rows have which experts of a mixture.

#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "interface.h"

// The rows of an expert, which are pairs [first, first + rows) of a row and an expert.
struct ExpertRows {
  int64_t expert, first, rows;
};

class Mixing {
 public:
  // Chooses by the router's outputs, [rows, count] or with the shared expert's gate [rows, count + 1].
  void choose(const Mixture& mixture, const float* routed, int64_t rows) {
    const int64_t each = mixture.chosen + mixture.shared, stride = mixture.count + mixture.router_count - 1;
    expert_.resize(rows * each);
    weight_.resize(rows * each);
    pair_.resize(rows * each);
    row_.resize(rows * each);
    for (int64_t row = 0; row < rows; ++row)
      choose_row(mixture, routed + row * stride, expert_.data() + row * each, weight_.data() + row * each);
    experts_.clear();
    int64_t pairs = 0;
    for (int64_t expert = 0; expert < mixture.count + mixture.shared; ++expert) {
      ExpertRows found{expert, pairs, 0};
      for (int64_t i = 0; i < rows * each; ++i) {
        if (expert_[i] != expert) continue;
        row_[pairs] = i / each;
        pair_[i] = pairs++;
        ++found.rows;
      }
      if (found.rows > 0) experts_.push_back(found);
    }
  }

  const std::vector<ExpertRows>& experts() const { return experts_; }
  int64_t pairs() const { return static_cast<int64_t>(pair_.size()); }
  int64_t row_of(int64_t pair) const { return row_[pair]; }
  // The expert of a pair.
  const ExpertRows& expert_of(int64_t pair) const {
    size_t i = 0;
    while (pair >= experts_[i].first + experts_[i].rows) ++i;
    return experts_[i];
  }
  // Calls add(pair, weight) for each expert of a row, by their numbers.
  template <typename Add>
  void each_of(int64_t row, int64_t rows, const Add& add) const {
    const int64_t each = pairs() / rows;
    for (int64_t i = row * each; i < (row + 1) * each; ++i) add(pair_[i], weight_[i]);
  }

 private:
  // A row's experts in ascending order, and their weights.
  void choose_row(const Mixture& mixture, const float* routed, int64_t* experts, float* weights) {
    const int64_t count = mixture.count, chosen = mixture.chosen;
    score(mixture, routed);
    taken_.assign(count, false);
    for (int64_t i = 0; i < chosen; ++i) taken_[best_left(mixture)] = true;
    float total = 0;
    for (int64_t expert = 0, i = 0; expert < count; ++expert) {
      if (!taken_[expert]) continue;
      experts[i] = expert;
      weights[i++] = scores_[expert];
      total += scores_[expert];
    }
    const float factor = static_cast<float>(mixture.scale) / (mixture.normalized ? total : 1);
    for (int64_t i = 0; i < chosen; ++i) weights[i] *= factor;
    if (mixture.shared == 0) return;
    experts[chosen] = count;
    weights[chosen] = mixture.router_count > 1 ? 1 / (1 + std::exp(-routed[count])) : 1;
  }

  void score(const Mixture& mixture, const float* routed) {
    scores_.assign(routed, routed + mixture.count);
    float most = -std::numeric_limits<float>::infinity(), total = 0;
    for (float each : scores_) most = each > most ? each : most;
    for (float& each : scores_) {
      each = mixture.sigmoid ? 1 / (1 + std::exp(-each)) : std::exp(each - most);
      total += each;
    }
    for (float& each : scores_) each = mixture.sigmoid ? each : each / total;
  }

  // The expert with the highest score of those that are not taken; the first of several, and of such as are no numbers.
  int64_t best_left(const Mixture& mixture) const {
    int64_t best = -1;
    float most = 0;
    for (int64_t expert = 0; expert < mixture.count; ++expert) {
      const float wish = scores_[expert] + (mixture.choice_bias ? mixture.choice_bias[expert] : 0);
      if (taken_[expert] || (best >= 0 && !(wish > most))) continue;
      best = expert;
      most = wish;
    }
    return best;
  }

  std::vector<float> scores_, weight_;  // weight_: [rows, experts of a row]
  std::vector<bool> taken_;
  std::vector<int64_t> expert_, pair_, row_;
  std::vector<ExpertRows> experts_;
};
