// A decoder at work: runs the program's blocks over rows, which are tokens of any sequences at any positions. A prompt is many
// rows of one sequence, a step of decoding is one row of each, and guesses are some rows more of a sequence.
//
// Threads share every matrix by its blocks of outputs (shares.h) and attention by its heads. They wait for each other where one
// needs what another has computed. A row's results depend neither on the number of threads nor on the other rows.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "faults.h"
#include "instruction_sets.h"
#include "mixing.h"
#include "preparation.h"
#include "shares.h"
#include "team.h"

class Engine {
 public:
  Engine(const Program& program, std::shared_ptr<Team> team, int64_t instruction_set)
      : program_(program),
        kernels_(kernels_for(instruction_set)),
        team_(std::move(team)),
        shares_(team_->size()),
        preparation_(kernels_, *team_, faults_, std::max({program.width, program.inner, program.heads * program.head_size}),
                     kPassRows) {
    x_.resize(kPassRows * program.width);
    last_.resize(kPassRows * program.width);
    qkv_.resize(kPassRows * qkv_width());
    attended_.resize(kPassRows * program.heads * program.head_size);
    inner_.resize(kPassRows * program.inner);
    branch_.resize(kPassRows * program.width);
    for (int64_t i = 0; i < program.block_count; ++i)
      if (program.blocks[i].mixture) room_for(*program.blocks[i].mixture);
    if (program.head.finer) finer_.resize(kPassRows * program.head.finer->matrix.outputs);
    scratch_.resize(team_->size());
    for (std::vector<float>& scratch : scratch_) scratch.resize(program.vocabulary);
  }

  void begin(const Cache& cache) {
    cache_ = cache;
    length_ = 0;
    chosen_ = false;
    scores_.assign(team_->size(), {});
    for (std::vector<float>& scores : scores_) scores.resize(kHeadsTogether * cache.most * cache.page);
    next_.resize(cache.sequences);
  }

  // Tokens of each sequence, as far as `run` knows.
  int64_t length() const { return length_; }
  const Cache& cache() const { return cache_; }
  const Program& program() const { return program_; }
  // Whether the last call chose tokens that another can go on from.
  bool chosen() const { return chosen_; }
  // Places of a sequence that can be filled.
  int64_t room() const { return std::min(cache_.capacity, program_.context); }

  // Appends tokens to all sequences and chooses further ones. Gives the block in which numbers were found that are not finite (the
  // last one's successor is the head), or Faults::kNone. After a fault the cache holds what it held before.
  int64_t run(const Request& request) {
    const int64_t before = length_, most = cache_.sequences * request.count;
    sequence_.resize(most);
    position_.resize(most);
    wanted_.resize(most);
    best_.resize(cache_.sequences * team_->size());
    request_ = &request;
    lay_out(request.tokens ? request.tokens : next_.data(), request.count);
    const int64_t fault = run_team();
    chosen_ = request.steps > 0 && fault == Faults::kNone;
    if (fault != Faults::kNone) length_ = before;
    return fault;
  }

  // Runs rows, whatever `run` did before, and chooses the most likely tokens after those that are wanted; answers as `run`.
  int64_t advance(const Rows& rows) {
    int64_t wanted = 0;
    for (int64_t row = 0; row < rows.count; ++row) wanted += rows.wanted[row];
    best_.resize(wanted * team_->size());
    request_ = nullptr;
    chosen_ = false;
    rows_ = rows;
    const int64_t fault = run_team();
    for (int64_t i = 0; fault == Faults::kNone && i < wanted; ++i) rows.chosen[i] = best_of(i);
    return fault;
  }

 private:
  static constexpr int64_t kPassRows = 64;  // rows whose activations stay in the second cache

  struct Best {
    float value = -std::numeric_limits<float>::infinity();
    int64_t index = 0;
    // Of several that are as good the first.
    void improve(Best other) {
      if (other.value > value || (other.value == value && other.index < index)) *this = other;
    }
  };
  // Rows [first, first + rows) of all; `wanted` ones came before. `stamp` grows from block to block and from pass to pass.
  struct Pass {
    int64_t first, rows, wanted, stamp;
  };

  int64_t run_team() {
    faults_.clear();
    team_->run([](void* self, int64_t id) { static_cast<Engine*>(self)->work(id); }, this);
    const int64_t first = faults_.first();
    return first == Faults::kNone ? first : first % (program_.block_count + 1);
  }

  // The next tokens of all sequences, sequence after sequence, as rows.
  void lay_out(const int64_t* tokens, int64_t count) {
    const int64_t all = cache_.sequences * count;
    for (int64_t row = 0; row < all; ++row) {
      sequence_[row] = row / count;
      position_[row] = length_ + row % count;
      wanted_[row] = row % count == count - 1;
    }
    rows_ = {all, tokens, sequence_.data(), position_.data(), wanted_.data(), nullptr, request_->logits};
    added_ = count;
  }

  // What each thread does; all take the same way through it.
  void work(int64_t id) {
    int64_t stamp = 0;
    bool good = run_passes(id, stamp);
    if (request_ == nullptr) return;
    for (int64_t step = 0; good && step < request_->steps; ++step) {
      choose(id, step);
      if (step + 1 < request_->steps) good = run_passes(id, stamp);
    }
  }

  bool run_passes(int64_t id, int64_t& stamp) {
    int64_t wanted = 0;
    for (int64_t first = 0; first < rows_.count; first += kPassRows, stamp += program_.block_count + 1) {
      const Pass pass{first, std::min(kPassRows, rows_.count - first), wanted, stamp};
      if (!run_pass(id, pass)) return false;
      for (int64_t row = 0; row < pass.rows; ++row) wanted += rows_.wanted[first + row];
    }
    if (id == 0 && request_ != nullptr) length_ += added_;
    team_->meet();
    return true;
  }

  bool run_pass(int64_t id, const Pass& pass) {
    team_->share(id, pass.rows, [&](int64_t row) {
      kernels_.embed(program_, rows_.tokens[pass.first + row], rows_.position[pass.first + row], x_.data() + row * program_.width);
    });
    team_->meet();
    for (int64_t layer = 0; layer < program_.block_count; ++layer) {
      run_block(id, pass, layer);
      if (faults_.any_up_to(pass.stamp + layer)) return false;
    }
    run_head(id, pass);
    return !faults_.any_up_to(pass.stamp + program_.block_count);
  }

  void run_block(int64_t id, const Pass& pass, int64_t layer) {
    const Block& block = program_.blocks[layer];
    project(id, pass, layer);
    attend(id, pass, layer);
    if (program_.parallel) widen(id, pass, layer);  // while x is what the attention had
    team_->meet();
    narrow(id, pass, layer, block.output, attended_.data(), block.after_attention);
    if (block.mixture) return mix(id, pass, layer);
    if (!program_.parallel) {
      widen(id, pass, layer);
      team_->meet();
    }
    narrow(id, pass, layer, block.down, inner_.data(), block.after_mlp);
  }

  // Queries, keys and values.
  void project(int64_t id, const Pass& pass, int64_t layer) {
    const Block& block = program_.blocks[layer];
    const Activations in = preparation_.normed(id, pass.stamp + layer, block.first, x_.data(), program_.width, pass.rows,
                                               Preparation::wants_quantized(block.qkv, block.qkv_count));
    multiply(id, {block.qkv, block.qkv_count, in, pass.rows, Finish::kStore, 0, qkv_.data(), qkv_width()});
    team_->meet();
    if (block.query_norm.together > 0) norm_heads(id, pass, layer, block.query_norm, program_.heads, query_at);
    if (block.key_norm.together > 0) norm_heads(id, pass, layer, block.key_norm, program_.kv_heads, key_at);
    if (block.query_norm.together > 0 || block.key_norm.together > 0) team_->meet();
  }

  // Norms the queries or the keys of each row, which begin at at(head).
  template <typename At>
  void norm_heads(int64_t id, const Pass& pass, int64_t layer, const HeadNorm& heads, int64_t count, const At& at) {
    const int64_t pieces = count * program_.head_size / heads.together;
    team_->share(id, pass.rows * pieces, [&](int64_t i) {
      const int64_t first = i % pieces * heads.together;
      Norm norm = heads.norm;
      norm.weight += first;
      if (norm.bias) norm.bias += first;
      float* x = qkv_.data() + i / pieces * qkv_width() + at(program_, first / program_.head_size);
      if (!kernels_.norm_some(norm, x, heads.together)) faults_.add(pass.stamp + layer);
    });
  }

  // What is between the MLP's matrices.
  void widen(int64_t id, const Pass& pass, int64_t layer) {
    const Block& block = program_.blocks[layer];
    const bool gated = block.gate.outputs > 0;
    const Matrix pair[2] = {gated ? block.gate : block.up, block.up};
    const Activations in = preparation_.normed(id, pass.stamp + layer, block.second, x_.data(), program_.width, pass.rows,
                                               Preparation::wants_quantized(pair, 2));
    multiply(id, {pair, gated ? 2 : 1, in, pass.rows, gated ? Finish::kGate : Finish::kActivate, program_.activation,
                  inner_.data(), program_.inner});
  }

  // Adds what a matrix makes of `from`, normed where there is a norm, to x.
  void narrow(int64_t id, const Pass& pass, int64_t layer, const Matrix& matrix, float* from, const Norm& after) {
    const int64_t width = program_.width, stamp = pass.stamp + layer;
    const float scale = static_cast<float>(program_.residual_scale);
    const Activations in = preparation_.plain(id, stamp, from, matrix.inputs, pass.rows, Preparation::wants_quantized(&matrix, 1));
    if (after.weight == nullptr) {
      multiply(id, {&matrix, 1, in, pass.rows, Finish::kAdd, 0, x_.data(), width, scale});
    } else {
      multiply(id, {&matrix, 1, in, pass.rows, Finish::kStore, 0, branch_.data(), width});
      team_->meet();
      team_->share(id, pass.rows, [&](int64_t row) {
        float *y = branch_.data() + row * width, *x = x_.data() + row * width;
        if (!kernels_.norm(after, y, y, width)) faults_.add(stamp);
        for (int64_t i = 0; i < width; ++i) x[i] += scale * y[i];
      });
    }
    team_->meet();
  }

  // The sum of a row's experts. All products of the experts' first matrices are shared as one, and those of the last ones.
  void mix(int64_t id, const Pass& pass, int64_t layer) {
    const Block& block = program_.blocks[layer];
    const Mixture& mixture = *block.mixture;
    const int64_t rows = pass.rows, stamp = pass.stamp + layer, width = program_.width;
    const int64_t group = Preparation::wants_quantized(mixture.experts[0].up, mixture.experts[0].up_count);
    const int64_t routers = Preparation::wants_quantized(mixture.routers, mixture.router_count);
    const Activations in = preparation_.normed(id, stamp, block.second, x_.data(), width, rows, std::max(group, routers));
    multiply(id, {mixture.routers, mixture.router_count, in, rows, Finish::kStore, 0, routed_.data(), router_outputs(mixture)});
    team_->meet();
    if (id == 0) mixing_.choose(mixture, routed_.data(), rows);
    team_->meet();
    if (rows > 1) {
      team_->share(id, mixing_.pairs(), [&](int64_t pair) {
        prepare_pair(pair, in.x + mixing_.row_of(pair) * width, wide_, width, width, group, stamp);
      });
      team_->meet();
    }
    const std::vector<ExpertRows>& experts = mixing_.experts();
    multiply_all(id, experts.size(), [&](int64_t i) {
      const Expert& expert = mixture.experts[experts[i].expert];
      return LinearTask{expert.up, expert.up_count, rows > 1 ? wide_.at(experts[i].first, width) : in, experts[i].rows,
                        Finish::kStore, 0, ups_.data() + experts[i].first * most_ups_, most_ups_};
    });
    team_->meet();
    team_->share(id, mixing_.pairs(), [&](int64_t pair) {
      const Expert& expert = mixture.experts[mixing_.expert_of(pair).expert];
      float* inner = gated_.data() + pair * most_inner_;
      kernels_.gate(mixture, program_.activation, ups_.data() + pair * most_ups_, inner, expert.down.inputs);
      prepare_pair(pair, inner, narrow_, most_inner_, expert.down.inputs, Preparation::wants_quantized(&expert.down, 1), stamp);
    });
    team_->meet();
    multiply_all(id, experts.size(), [&](int64_t i) {
      const Expert& expert = mixture.experts[experts[i].expert];
      return LinearTask{&expert.down, 1, narrow_.at(experts[i].first, most_inner_), experts[i].rows,
                        Finish::kStore, 0, outs_.data() + experts[i].first * width, width};
    });
    team_->meet();
    team_->share(id, rows, [&](int64_t row) { add_experts(row, rows, block, stamp); });
    team_->meet();
  }

  // What pairs of rows and experts multiply matrices with: each expert's rows lie together, as Activations do.
  struct PairNumbers {
    std::vector<float> x, step;
    std::vector<int8_t> q;
    std::vector<int32_t> less;

    void resize(int64_t pairs, int64_t inputs) {
      x.resize(std::max<size_t>(x.size(), pairs * inputs));
      q.resize(x.size());
      step.resize(x.size() / 32);
      less.resize(x.size() / 32);
    }
    Activations at(int64_t first, int64_t inputs) {
      const int64_t place = first * inputs;
      return {x.data() + place, q.data() + place, step.data() + place / 32, less.data() + place / 32};
    }
  };

  // A pair's numbers for a matrix of `inputs`, of which there is room for `most` with each pair.
  void prepare_pair(int64_t pair, const float* from, PairNumbers& to, int64_t most, int64_t inputs, int64_t group, int64_t stamp) {
    const ExpertRows& expert = mixing_.expert_of(pair);
    const Activations numbers = to.at(expert.first, most);
    const int64_t row = pair - expert.first;
    if (group == 0)
      std::copy_n(from, inputs, numbers.x + row * inputs);
    else if (!kernels_.quantize(from, inputs, group, row, expert.rows, numbers))
      faults_.add(stamp);
  }

  void add_experts(int64_t row, int64_t rows, const Block& block, int64_t stamp) {
    const int64_t width = program_.width;
    const float scale = static_cast<float>(program_.residual_scale);
    float *y = branch_.data() + row * width, *x = x_.data() + row * width;
    std::fill_n(y, width, 0.0f);
    mixing_.each_of(row, rows, [&](int64_t pair, float weight) {
      const float* out = outs_.data() + pair * width;
      for (int64_t i = 0; i < width; ++i) y[i] += weight * out[i];
    });
    if (block.after_mlp.weight && !kernels_.norm(block.after_mlp, y, y, width)) faults_.add(stamp);
    for (int64_t i = 0; i < width; ++i) x[i] += scale * y[i];
  }

  static int64_t router_outputs(const Mixture& mixture) { return mixture.count + mixture.router_count - 1; }

  void room_for(const Mixture& mixture) {
    const int64_t pairs = kPassRows * (mixture.chosen + mixture.shared);
    for (int64_t i = 0; i < mixture.count + mixture.shared; ++i) {
      most_inner_ = std::max(most_inner_, (mixture.experts[i].down.inputs + 31) / 32 * 32);
      most_ups_ = 2 * most_inner_;
    }
    const auto grow = [](std::vector<float>& numbers, int64_t count) { numbers.resize(std::max<size_t>(numbers.size(), count)); };
    grow(routed_, kPassRows * router_outputs(mixture));
    grow(ups_, pairs * most_ups_);
    grow(gated_, pairs * most_inner_);
    grow(outs_, pairs * program_.width);
    wide_.resize(pairs, (program_.width + 31) / 32 * 32);
    narrow_.resize(pairs, most_inner_);
  }

  void attend(int64_t id, const Pass& pass, int64_t layer) {
    const Block& block = program_.blocks[layer];
    const int64_t angles = block.rotary * cache_.angles * program_.rotary_size / 2;
    const bool turns = block.rotary >= 0;
    const AttentionTask task{&program_, &cache_, layer, block.window, static_cast<float>(block.scale),
                             turns ? cache_.cosines + angles : nullptr, turns ? cache_.sines + angles : nullptr, block.sinks,
                             qkv_.data(), attended_.data(), rows_.sequence + pass.first, rows_.position + pass.first};
    team_->share(id, program_.kv_heads, [&](int64_t kv_head) {  // two tokens may share a byte, so that a head is of one thread
      for (int64_t row = 0; row < pass.rows; ++row) kernels_.append(task, row, kv_head);
    });
    team_->meet();
    const HeadPieces pieces = head_pieces(pass.rows);
    team_->share(id, pass.rows * pieces.of_row, [&](int64_t i) {
      const int64_t first = i % pieces.of_row / pieces.of_group * group_heads(), piece = i % pieces.of_row % pieces.of_group;
      const int64_t head = piece * pieces.heads, count = std::min(pieces.heads, group_heads() - head);
      kernels_.attend(task, i / pieces.of_row, first + head, count, scores_[id].data());
    });
  }

  // Heads of a group share their keys and values, which are read once where they are attended to together.
  struct HeadPieces {
    int64_t heads, of_group, of_row;  // heads of a piece, pieces of a group, pieces of a row
  };

  int64_t group_heads() const { return program_.heads / program_.kv_heads; }

  // Whole groups, or as small parts of them as give work to all threads.
  HeadPieces head_pieces(int64_t rows) const {
    const int64_t all = group_heads(), groups = rows * program_.kv_heads;
    const int64_t heads = std::clamp<int64_t>(all * groups / team_->size(), 1, all);
    const int64_t of_group = (all + heads - 1) / heads;
    return {heads, of_group, of_group * program_.kv_heads};
  }

  // The logits after those of the pass's rows that are wanted.
  void run_head(int64_t id, const Pass& pass) {
    int64_t rows = 0;
    for (int64_t row = 0; row < pass.rows; ++row) {
      if (!rows_.wanted[pass.first + row]) continue;
      if (id == 0) std::copy_n(x_.data() + row * program_.width, program_.width, last_.data() + rows * program_.width);
      ++rows;
    }
    if (rows == 0) return;
    team_->meet();
    float* logits = rows_.logits + pass.wanted * program_.vocabulary;
    const Activations in = preparation_.normed(id, pass.stamp + program_.block_count, program_.final, last_.data(),
                                               program_.width, rows, Preparation::wants_quantized(&program_.head, 1));
    if (const FinerRows* finer = program_.head.finer) {
      multiply(id, {&finer->matrix, 1, in, rows, Finish::kStore, 0, finer_.data(), finer->matrix.outputs});
      team_->meet();
    }
    const bool greedy = request_ == nullptr || (request_->steps > 0 && request_->temperature == 0);
    for (int64_t row = 0; row < rows; ++row) best_at(id, pass.wanted + row) = Best{};
    multiply(id, {&program_.head, 1, in, rows, Finish::kStore, 0, logits, program_.vocabulary}, [&](Stretch blocks) {
      for (int64_t row = 0; row < rows; ++row) {
        add_finer(blocks, row, logits + row * program_.vocabulary);
        cap_logits(blocks, logits + row * program_.vocabulary);
        if (greedy) find_best(blocks, logits + row * program_.vocabulary, best_at(id, pass.wanted + row));
      }
    });
    team_->meet();
  }

  // What the finer rows among the blocks add to logits that the thread itself has just computed.
  void add_finer(Stretch blocks, int64_t row, float* logits) const {
    const FinerRows* finer = program_.head.finer;
    if (finer == nullptr) return;
    const int64_t count = finer->matrix.outputs, end = blocks.last * kBlockOutputs;
    const float* more = finer_.data() + row * count;
    for (int64_t i = std::lower_bound(finer->rows, finer->rows + count, blocks.first * kBlockOutputs) - finer->rows;
         i < count && finer->rows[i] < end; ++i)
      logits[finer->rows[i]] += more[i];
  }

  void cap_logits(Stretch blocks, float* logits) const {
    if (program_.logit_cap == 0) return;
    const int64_t begin = blocks.first * kBlockOutputs, end = std::min(blocks.last * kBlockOutputs, program_.vocabulary);
    kernels_.cap(logits + begin, end - begin, static_cast<float>(program_.logit_cap));
  }

  Best& best_at(int64_t id, int64_t wanted) { return best_[wanted * team_->size() + id]; }

  // The largest of the logits that the thread itself has just computed, if it is better still.
  void find_best(Stretch blocks, const float* logits, Best& best) const {
    const int64_t begin = blocks.first * kBlockOutputs;
    const int64_t count = std::min(blocks.last * kBlockOutputs, program_.vocabulary) - begin;
    const int64_t index = begin + kernels_.largest(logits + begin, count);
    best.improve({logits[index], index});
  }

  int64_t best_of(int64_t wanted) {
    Best winner;
    for (int64_t id = 0; id < team_->size(); ++id) winner.improve(best_at(id, wanted));
    return winner.index;
  }

  // The next token of every sequence, into the request's and as the next rows.
  void choose(int64_t id, int64_t step) {
    const Request& request = *request_;
    team_->share(id, cache_.sequences, [&](int64_t sequence) {
      const float* logits = request.logits + sequence * program_.vocabulary;
      next_[sequence] = request.temperature > 0
                            ? kernels_.drawn(logits, program_.vocabulary, request.temperature,
                                             point(request.seed, sequence, length_), scratch_[id].data())
                            : best_of(sequence);
      request.chosen[sequence * request.stride + step] = next_[sequence];
    });
    if (id == 0) lay_out(next_.data(), 1);
    team_->meet();
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

  // The same of several tasks, whose blocks are shared as if they were one after the other.
  template <typename TaskOf>
  void multiply_all(int64_t id, int64_t tasks, const TaskOf& task_of) {
    const auto count = [&](int64_t i) {
      const LinearTask task = task_of(i);
      int64_t blocks = 0;
      for (int64_t j = 0; j < task.count; ++j) blocks += blocks_of(task.matrices[j]);
      return blocks;
    };
    int64_t all = 0;
    for (int64_t i = 0; i < tasks; ++i) all += count(i);
    shares_.begin(id);
    for (Stretch blocks = shares_.take(id, all); blocks.size() > 0; blocks = shares_.take(id, all)) {
      int64_t before = 0;
      for (int64_t i = 0; i < tasks && before < blocks.last; ++i) {
        const int64_t own = count(i);
        const int64_t first = std::max<int64_t>(0, blocks.first - before), last = std::min(own, blocks.last - before);
        if (first < last) kernels_.linear(task_of(i), first, last);
        before += own;
      }
    }
  }

  const Program program_;
  const Kernels kernels_;
  const std::shared_ptr<Team> team_;
  Faults faults_;
  Shares shares_;
  Preparation preparation_;
  Cache cache_{};
  int64_t length_ = 0, added_ = 0;
  const Request* request_ = nullptr;  // null while `advance` runs
  Rows rows_{};
  std::vector<int64_t> sequence_, position_;  // the rows of a request
  std::vector<uint8_t> wanted_;
  std::vector<float> x_, last_, qkv_, attended_, inner_, branch_, finer_;
  std::vector<std::vector<float>> scores_, scratch_;  // of each thread
  Mixing mixing_;
  int64_t most_inner_ = 0, most_ups_ = 0;  // of all experts
  std::vector<float> routed_, ups_, gated_, outs_;
  PairNumbers wide_, narrow_;
  std::vector<Best> best_;
  std::vector<int64_t> next_;
  bool chosen_ = false;
};
