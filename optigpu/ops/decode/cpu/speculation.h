// Greedy decoding of one sequence in which a pass also verifies guesses: what the decoder chooses after each of them says how many
// are right. A row's results do not depend on the other rows, so the text is that of decoding without guesses, bit by bit.
//
// Leviathan et al., 2022, arXiv:2211.17192, with a temperature of zero.

#pragma once

#include <time.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "engine.h"
#include "guesses.h"
#include "pace.h"

class Speculation {
 public:
  Speculation(Engine& engine, std::unique_ptr<Guesser> guesser, int64_t lookahead)
      : engine_(engine), guesser_(std::move(guesser)), pace_(guesser_->kinds()), lookahead_(lookahead), given_(lookahead + 1),
        position_(lookahead + 1), sequence_(lookahead + 1), chosen_(lookahead + 1), wanted_(lookahead + 1, 1) {}

  // False where the draft's numbers are not finite.
  bool begin(const int64_t* text, int64_t known) {
    pace_.begin();
    return guesser_->begin(text, known);
  }

  // Passes until enough tokens are chosen; answers as Engine::run. What was chosen before a fault stays.
  int64_t run(Guessing& request) {
    request.chosen = request.passes = request.guessed = request.right = 0;
    while (request.chosen < request.least) {
      const int64_t fault = pass(request);
      if (fault != Faults::kNone) return fault;
    }
    return Faults::kNone;
  }

 private:
  // Of the calling thread, which works or spins all the while: time in which another process had its CPU says nothing of guesses.
  static double seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  }

  int64_t pass(Guessing& request) {
    const double begun = seconds();
    const int64_t known = request.known + request.chosen;
    // The last of all tokens needs no guess after it, and no place in the cache.
    const int64_t most = std::min({lookahead_, request.most - request.chosen - 1, engine_.room() - known});
    const int64_t kind = most > 0 ? guesser_->kind(request.text, known) : -1;
    const int64_t worth = kind < 0 ? 0 : pace_.guesses(kind, most);
    const int64_t guessed = worth > 0 ? guesser_->guess(request.text, known, worth, given_.data() + 1) : 0;
    given_[0] = request.text[known - 1];
    for (int64_t i = 0; i <= guessed; ++i) position_[i] = known - 1 + i;
    const Rows rows{guessed + 1, given_.data(), sequence_.data(), position_.data(), wanted_.data(), chosen_.data(), request.logits};
    const int64_t fault = engine_.advance(rows);
    if (fault != Faults::kNone) return fault;
    int64_t right = 0;
    while (right < guessed && chosen_[right] == given_[right + 1]) ++right;
    std::copy_n(chosen_.data(), right + 1, request.text + known);
    request.chosen += right + 1;
    request.passes += 1;
    request.guessed += guessed;
    request.right += right;
    pace_.learn(kind, guessed, right, seconds() - begun);
    return Faults::kNone;
  }

  Engine& engine_;
  const std::unique_ptr<Guesser> guesser_;
  Pace pace_;
  const int64_t lookahead_;
  std::vector<int64_t> given_, position_, sequence_, chosen_;
  std::vector<uint8_t> wanted_;
};
