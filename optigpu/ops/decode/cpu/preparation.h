// What rows are before they are multiplied: normed, and quantized where a matrix wants numbers.

#pragma once

#include <cstdint>
#include <vector>

#include "faults.h"
#include "tasks.h"
#include "team.h"

// With few rows each thread prepares all of them for itself, which takes less time than waiting for the others; so results never
// depend on the number of threads.
class Preparation {
 public:
  Preparation(const Kernels& kernels, Team& team, Faults& faults, int64_t most_inputs, int64_t most_rows)
      : kernels_(kernels), team_(team), faults_(faults), inputs_(most_inputs), alone_(team.size()) {
    for (Buffers& buffers : alone_) make(buffers, kAloneRows);
    make(shared_, most_rows);
  }

  // The group of the first matrix that is multiplied with numbers, 0 where all take floats.
  static int64_t wants_quantized(const Matrix* matrices, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      if (matrices[i].kind != kBfloat16Weights) return matrices[i].group;
    return 0;
  }

  // x, [rows, width], normed for matrices of a group, or as it is where there is no norm.
  Activations normed(int64_t id, int64_t stamp, const Norm& norm, float* x, int64_t width, int64_t rows, int64_t group) {
    if (norm.weight == nullptr) return plain(id, stamp, x, width, rows, group);
    return made(id, stamp, rows, [&](const Activations& to, int64_t row) {
      float* h = to.x + row * width;
      return kernels_.norm(norm, x + row * width, h, width) && quantized(to, h, row, rows, width, group);
    });
  }

  // x, [rows, inputs], for matrices of a group.
  Activations plain(int64_t id, int64_t stamp, float* x, int64_t inputs, int64_t rows, int64_t group) {
    if (group == 0) return {x, nullptr, nullptr, nullptr};
    Activations found = made(id, stamp, rows, [&](const Activations& to, int64_t row) {
      return quantized(to, x + row * inputs, row, rows, inputs, group);
    });
    found.x = x;  // a matrix of bfloat16 beside one of few bits takes floats
    return found;
  }

 private:
  static constexpr int64_t kAloneRows = 4;

  struct Buffers {
    std::vector<float> x, step;
    std::vector<int8_t> q;
    std::vector<int32_t> less;
  };

  void make(Buffers& buffers, int64_t rows) const {
    const int64_t groups = inputs_ / 32 + 1;
    buffers.x.resize(rows * inputs_);
    buffers.q.resize(rows * inputs_);
    buffers.step.resize(rows * groups);
    buffers.less.resize(rows * groups);
  }

  static Activations view(Buffers& buffers) {
    return {buffers.x.data(), buffers.q.data(), buffers.step.data(), buffers.less.data()};
  }

  bool quantized(const Activations& to, const float* x, int64_t row, int64_t rows, int64_t inputs, int64_t group) const {
    return group == 0 || kernels_.quantize(x, inputs, group, row, rows, to);
  }

  // Calls make(buffers, row) for all rows: each thread for itself where they are few, else together.
  template <typename Make>
  Activations made(int64_t id, int64_t stamp, int64_t rows, const Make& make) {
    const bool alone = rows <= kAloneRows;
    const Activations to = view(alone ? alone_[id] : shared_);
    const auto one = [&](int64_t row) {
      if (!make(to, row)) faults_.add(stamp);
    };
    if (alone) {
      for (int64_t row = 0; row < rows; ++row) one(row);
      return to;
    }
    team_.share(id, rows, one);
    team_.meet();
    return to;
  }

  const Kernels& kernels_;
  Team& team_;
  Faults& faults_;
  const int64_t inputs_;
  std::vector<Buffers> alone_;
  Buffers shared_;
};
