// A decoder at work: runs the program's blocks over rows, which are tokens of any sequences. A prompt is many rows of one
// sequence, a step of decoding is one row of each.
//
// Threads share every matrix by its blocks of outputs (shares.h) and attention by its heads. They wait for each other where one
// needs what another has computed. With few rows each thread norms and quantizes all of them for itself, which takes less
// time than waiting for the others; so results never depend on the number of threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "instruction_sets.h"
#include "shares.h"
#include "team.h"

// What a call asks for.
struct Request {
  const int64_t* tokens;   // [sequences, count], or null for one of each: that which the last call chose
  int64_t count;
  int64_t steps;           // further tokens of each sequence, 0 for none
  float temperature;
  uint64_t seed;
  int64_t* chosen;         // [sequences, steps], `stride` from row to row
  int64_t stride;
  float* logits;           // [sequences, vocabulary], of the last step
};

class Engine {
 public:
  Engine(const Program& program, std::vector<int64_t> cpus, int64_t instruction_set)
      : program_(program), kernels_(kernels_for(instruction_set)), shares_(static_cast<int64_t>(cpus.size())), team_(std::move(cpus)) {
    inputs_ = std::max({program.width, program.inner, program.heads * program.head_size});
    groups_ = inputs_ / 32 + 1;
    alone_.resize(team_.size());
    for (Buffers& buffers : alone_) make(buffers, kAloneRows);
    make(shared_, kPassRows);
    x_.resize(kPassRows * program.width);
    last_.resize(kPassRows * program.width);
    qkv_.resize(kPassRows * (program.heads + 2 * program.kv_heads) * program.head_size);
    attended_.resize(kPassRows * program.heads * program.head_size);
    inner_.resize(kPassRows * program.inner);
    scratch_.resize(team_.size());
    for (std::vector<float>& scratch : scratch_) scratch.resize(program.vocabulary);
  }

  void begin(const Cache& cache) {
    cache_ = cache;
    length_ = 0;
    chosen_ = false;
    scores_.assign(team_.size(), {});
    for (std::vector<float>& scores : scores_) scores.resize(cache.stored);
    best_.resize(team_.size() * cache.sequences);
    next_.resize(cache.sequences);
  }

  int64_t length() const { return length_; }
  const Cache& cache() const { return cache_; }
  const Program& program() const { return program_; }
  // Whether the last call chose tokens that another can go on from.
  bool chosen() const { return chosen_; }

  // The block in which numbers were found that are not finite (the last one's successor is the head), or kNoFault. The
  // cache then holds what it held before.
  int64_t run(const Request& request) {
    request_ = &request;
    fault_.store(kNoFault);
    const int64_t before = length_;
    team_.run([](void* self, int64_t id) { static_cast<Engine*>(self)->work(id); }, this);
    chosen_ = request.steps > 0 && fault_.load() == kNoFault;
    if (fault_.load() == kNoFault) return kNoFault;
    length_ = before;
    return fault_.load() % (program_.block_count + 1);
  }

  static constexpr int64_t kNoFault = std::numeric_limits<int64_t>::max();

 private:
  static constexpr int64_t kPassRows = 64;   // rows whose activations stay in the second cache
  static constexpr int64_t kAloneRows = 4;   // rows that every thread prepares for itself

  struct Buffers {
    std::vector<float> x, step;
    std::vector<int8_t> q;
    std::vector<int32_t> sum;
  };
  struct Best {
    float value = -std::numeric_limits<float>::infinity();
    int64_t index = 0;
    // Of several that are as good the first.
    void improve(Best other) {
      if (other.value > value || (other.value == value && other.index < index)) *this = other;
    }
  };
  // Rows [first, first + rows) of all sequences' new tokens, sequence after sequence. `stamp` grows from block to block
  // and from pass to pass.
  struct Pass {
    const int64_t* tokens;
    int64_t count, first, rows, stamp;
    int64_t sequence[kPassRows], position[kPassRows];
  };

  void make(Buffers& buffers, int64_t rows) const {
    buffers.x.resize(rows * inputs_);
    buffers.q.resize(rows * inputs_);
    buffers.step.resize(rows * groups_);
    buffers.sum.resize(rows * groups_);
  }

  static Activations view(Buffers& buffers) {
    return {buffers.x.data(), buffers.q.data(), buffers.step.data(), buffers.sum.data()};
  }

  // What each thread does; all take the same way through it.
  void work(int64_t id) {
    const Request& request = *request_;
    int64_t stamp = 0;
    bool good = run_passes(id, request.tokens ? request.tokens : next_.data(), request.count, stamp);
    for (int64_t step = 0; good && step < request.steps; ++step) {
      choose(id, step);
      if (step + 1 < request.steps) good = run_passes(id, next_.data(), 1, stamp);
    }
  }

  // Whether a fault has been found up to a stamp. Later ones do not count: a thread that is ahead may have found one, and
  // all must answer alike.
  bool failed(int64_t stamp) const { return fault_.load() <= stamp; }

  void fail(int64_t stamp) {
    int64_t known = fault_.load();
    while (stamp < known && !fault_.compare_exchange_weak(known, stamp)) {
    }
  }

  bool run_passes(int64_t id, const int64_t* tokens, int64_t count, int64_t& stamp) {
    const int64_t all = cache_.sequences * count, start = length_;
    for (int64_t first = 0; first < all; first += kPassRows, stamp += program_.block_count + 1) {
      Pass pass{tokens, count, first, std::min(kPassRows, all - first), stamp, {}, {}};
      for (int64_t row = 0; row < pass.rows; ++row) {
        pass.sequence[row] = (first + row) / count;
        pass.position[row] = start + (first + row) % count;
      }
      if (!run_pass(id, pass)) return false;
    }
    if (id == 0) length_ = start + count;
    team_.meet();
    return true;
  }

  bool run_pass(int64_t id, const Pass& pass) {
    share(id, pass.rows, [&](int64_t row) {
      kernels_.embed(program_, pass.tokens[pass.first + row], pass.position[row], x_.data() + row * program_.width);
    });
    team_.meet();
    for (int64_t layer = 0; layer < program_.block_count; ++layer) {
      run_block(id, pass, layer);
      if (failed(pass.stamp + layer)) return false;
    }
    run_head(id, pass);
    return !failed(pass.stamp + program_.block_count);
  }

  void run_block(int64_t id, const Pass& pass, int64_t layer) {
    const Block& block = program_.blocks[layer];
    const int64_t rows = pass.rows;
    const Activations in = normed(id, pass.stamp + layer, block.first, x_.data(), rows, wants_quantized(block.qkv, block.qkv_count));
    multiply(id, {block.qkv, block.qkv_count, in, rows, Finish::kStore, 0, qkv_.data(), qkv_width()});
    team_.meet();
    attend(id, pass, layer);
    team_.meet();
    const Activations mixed = prepared(id, pass.stamp + layer, attended_.data(), program_.heads * program_.head_size, rows, block.output);
    multiply(id, {&block.output, 1, mixed, rows, Finish::kAdd, 0, x_.data(), program_.width});
    team_.meet();
    const bool gated = block.gate.outputs > 0;
    const Matrix pair[2] = {gated ? block.gate : block.up, block.up};
    const Activations second = normed(id, pass.stamp + layer, block.second, x_.data(), rows, wants_quantized(pair, 2));
    multiply(id, {pair, gated ? 2 : 1, second, rows, gated ? Finish::kGate : Finish::kActivate, program_.activation,
                  inner_.data(), program_.inner});
    team_.meet();
    const Activations inner = prepared(id, pass.stamp + layer, inner_.data(), program_.inner, rows, block.down);
    multiply(id, {&block.down, 1, inner, rows, Finish::kAdd, 0, x_.data(), program_.width});
    team_.meet();
  }

  void attend(int64_t id, const Pass& pass, int64_t layer) {
    const Block& block = program_.blocks[layer];
    const AttentionTask task{&program_, &cache_, layer, block.window, static_cast<float>(block.scale), qkv_.data(),
                             attended_.data(), pass.sequence, pass.position};
    share(id, pass.rows * program_.kv_heads,
          [&](int64_t i) { kernels_.append(task, i / program_.kv_heads, i % program_.kv_heads); });
    team_.meet();
    share(id, pass.rows * program_.heads,
          [&](int64_t i) { kernels_.attend(task, i / program_.heads, i % program_.heads, scores_[id].data()); });
  }

  // The logits of those sequences whose last new token is in the pass.
  void run_head(int64_t id, const Pass& pass) {
    int64_t rows = 0, first_sequence = 0;
    for (int64_t row = 0; row < pass.rows; ++row) {
      if ((pass.first + row) % pass.count != pass.count - 1) continue;
      if (rows == 0) first_sequence = pass.sequence[row];
      if (id == 0) std::copy_n(x_.data() + row * program_.width, program_.width, last_.data() + rows * program_.width);
      ++rows;
    }
    if (rows == 0) return;
    team_.meet();
    float* logits = request_->logits + first_sequence * program_.vocabulary;
    const Activations in =
        normed(id, pass.stamp + program_.block_count, program_.final, last_.data(), rows, wants_quantized(&program_.head, 1));
    const bool greedy = request_->steps > 0 && request_->temperature == 0;
    for (int64_t row = 0; row < rows; ++row) best_at(id, first_sequence + row) = Best{};
    multiply(id, {&program_.head, 1, in, rows, Finish::kStore, 0, logits, program_.vocabulary}, [&](Stretch blocks) {
      for (int64_t row = 0; greedy && row < rows; ++row)
        find_best(blocks, logits + row * program_.vocabulary, best_at(id, first_sequence + row));
    });
    team_.meet();
  }

  Best& best_at(int64_t id, int64_t sequence) { return best_[sequence * team_.size() + id]; }

  // The largest of the logits that the thread itself has just computed, if it is better still.
  void find_best(Stretch blocks, const float* logits, Best& best) const {
    const int64_t begin = blocks.first * kBlockOutputs;
    const int64_t count = std::min(blocks.last * kBlockOutputs, program_.vocabulary) - begin;
    const int64_t index = begin + kernels_.largest(logits + begin, count);
    best.improve({logits[index], index});
  }

  int64_t best_of(int64_t sequence) {
    Best winner;
    for (int64_t id = 0; id < team_.size(); ++id) winner.improve(best_at(id, sequence));
    return winner.index;
  }

  // The next token of every sequence, into the request's and into next_.
  void choose(int64_t id, int64_t step) {
    const Request& request = *request_;
    share(id, cache_.sequences, [&](int64_t sequence) {
      const float* logits = request.logits + sequence * program_.vocabulary;
      next_[sequence] = request.temperature > 0
                            ? kernels_.drawn(logits, program_.vocabulary, request.temperature,
                                             point(request.seed, sequence, length_), scratch_[id].data())
                            : best_of(sequence);
      request.chosen[sequence * request.stride + step] = next_[sequence];
    });
    team_.meet();
  }

  // A number from 0 to 1 that depends on nothing else: splitmix64 (Steele et al., 2014).
  static double point(uint64_t seed, int64_t sequence, int64_t position) {
    uint64_t bits = mixed(mixed(mixed(seed) + static_cast<uint64_t>(sequence)) + static_cast<uint64_t>(position));
    return static_cast<double>(bits >> 11) * 0x1p-53;
  }
  static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  int64_t qkv_width() const { return (program_.heads + 2 * program_.kv_heads) * program_.head_size; }

  // The group of the first matrix that is multiplied with numbers, 0 where all take floats.
  static int64_t wants_quantized(const Matrix* matrices, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      if (matrices[i].kind != kBfloat16Weights) return matrices[i].group;
    return 0;
  }

  Activations normed(int64_t id, int64_t stamp, const Norm& norm, const float* x, int64_t rows, int64_t group) {
    const int64_t width = program_.width;
    return prepared_by(id, stamp, rows, [&](const Activations& to, int64_t row) {
      float* h = to.x + row * width;
      return kernels_.norm(norm, x + row * width, h, width) && quantized(to, h, row, width, group);
    });
  }

  Activations prepared(int64_t id, int64_t stamp, float* x, int64_t inputs, int64_t rows, const Matrix& matrix) {
    const int64_t group = wants_quantized(&matrix, 1);
    if (group == 0) return {x, nullptr, nullptr, nullptr};
    return prepared_by(id, stamp, rows,
                       [&](const Activations& to, int64_t row) { return quantized(to, x + row * inputs, row, inputs, group); });
  }

  bool quantized(const Activations& to, const float* x, int64_t row, int64_t inputs, int64_t group) const {
    if (group == 0) return true;
    const int64_t groups = inputs / group;
    return kernels_.quantize(x, inputs, group, to.q + row * inputs, to.step + row * groups, to.sum + row * groups);
  }

  // Calls make(buffers, row) for all rows: each thread for itself where they are few, else together.
  template <typename Make>
  Activations prepared_by(int64_t id, int64_t stamp, int64_t rows, const Make& make) {
    const bool alone = rows <= kAloneRows;
    const Activations to = view(alone ? alone_[id] : shared_);
    const auto one = [&](int64_t row) {
      if (!make(to, row)) fail(stamp);
    };
    if (alone) {
      for (int64_t row = 0; row < rows; ++row) one(row);
      return to;
    }
    share(id, rows, one);
    team_.meet();
    return to;
  }

  void multiply(int64_t id, const LinearTask& task) {
    multiply(id, task, [](Stretch) {});
  }

  // Calls done(blocks) after each stretch of blocks that is the thread's.
  template <typename Done>
  void multiply(int64_t id, const LinearTask& task, const Done& done) {
    int64_t count = 0;
    for (int64_t i = 0; i < (task.finish == Finish::kGate ? 1 : task.count); ++i) count += blocks_of(task.matrices[i]);
    shares_.begin(id);
    for (Stretch blocks = shares_.take(id, count); blocks.size() > 0; blocks = shares_.take(id, count)) {
      kernels_.linear(task, blocks.first, blocks.last);
      done(blocks);
    }
  }

  template <typename Do>
  void share(int64_t id, int64_t count, const Do& what) const {
    for (int64_t i = count * id / team_.size(); i < count * (id + 1) / team_.size(); ++i) what(i);
  }

  const Program program_;
  const Kernels kernels_;
  Cache cache_{};
  int64_t length_ = 0, inputs_ = 0, groups_ = 0;
  const Request* request_ = nullptr;
  std::atomic<int64_t> fault_{kNoFault};  // the stamp of the first
  std::vector<Buffers> alone_;
  Buffers shared_;
  std::vector<float> x_, last_, qkv_, attended_, inner_;
  std::vector<std::vector<float>> scores_, scratch_;  // of each thread
  std::vector<Best> best_;
  std::vector<int64_t> next_;
  bool chosen_ = false;
  Shares shares_;
  Team team_;  // last: its threads use everything above
};
