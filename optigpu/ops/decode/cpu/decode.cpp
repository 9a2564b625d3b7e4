// The decoder as plain C functions, which interface.py calls through ctypes: a call is some microseconds, and a token takes a
// thousand. Each returns 0, or writes one sentence into `message` (kMessage bytes) and returns one of Outcome.

#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "checks.h"
#include "speculation.h"

namespace {

enum Outcome : int64_t { kDone = 0, kWrongCall = 1, kNoMemory = 2, kCannotGoOn = 3 };
constexpr int64_t kMessage = 512;

struct Decoder {
  Decoder(const Program& program, std::shared_ptr<Team> team, int64_t instruction_set)
      : team(team), engine(program, std::move(team), instruction_set), process(getpid()) {}
  const std::shared_ptr<Team> team;
  Engine engine;
  const pid_t process;  // threads do not follow into a forked child
  bool has_cache = false;
};

struct Guessed {
  const Decoder& decoder;
  const Decoder* draft;
  Speculation speculation;
};

int64_t say(char* message, int64_t outcome, const std::string& sentence) {
  std::snprintf(message, kMessage, "%s", sentence.c_str());
  return outcome;
}

// Why a decoder cannot run now, or nothing.
std::string not_ready(const Decoder& decoder) {
  if (decoder.process != getpid())
    return "A decoder works only in the process that made it, and this one was forked: make another here.";
  return decoder.has_cache ? "" : "The decoder has no cache yet: call begin first.";
}

int64_t answer(const Engine& engine, int64_t block, char* message) {
  if (block == Faults::kNone) return kDone;
  const bool head = block == engine.program().block_count;
  return say(message, kCannotGoOn, "The activations are no longer finite " +
                                      (head ? std::string("before the head") : "in block " + std::to_string(block)) +
                                      ": the weights or the activations overflow.");
}

template <typename Do>
int64_t with_memory(char* message, const char* sentence, const Do& what) {
  try {
    return what();
  } catch (const std::bad_alloc&) {
    return say(message, kNoMemory, sentence);
  }
}

}  // namespace

extern "C" int64_t optigpu_decoder_best_instruction_set() { return best_instruction_set(); }

// `cpus`: for each of `threads` the CPU that it is pinned to, or -1. `beside`: a decoder whose threads this one uses too, so that
// they do not wait for the same CPUs, or null. What `program` points to must outlive the decoder.
extern "C" int64_t optigpu_decoder_create(const Program* program, int64_t threads, const int64_t* cpus, int64_t instruction_set,
                                          const void* beside, void** made, char* message) {
  if (threads < 1) return say(message, kWrongCall, "A decoder needs at least one thread.");
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  if (!cpu_has(instruction_set)) return say(message, kWrongCall, "This CPU lacks the instruction set that was asked for.");
  const std::string wrong = wrong_program(*program);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  try {
    std::shared_ptr<Team> team = beside ? static_cast<const Decoder*>(beside)->team
                                        : std::make_shared<Team>(std::vector<int64_t>(cpus, cpus + threads));
    *made = new Decoder(*program, std::move(team), instruction_set);
    return kDone;
  } catch (const std::bad_alloc&) {
    return say(message, kNoMemory, "There is not enough memory for the decoder's activations.");
  } catch (const std::system_error& error) {
    return say(message, kNoMemory, std::string("The decoder's threads could not be started: ") + error.what() + ".");
  }
}

extern "C" void optigpu_decoder_destroy(void* handle) {
  Decoder* decoder = static_cast<Decoder*>(handle);
  if (decoder->process == getpid()) delete decoder;  // in a forked child there is nobody to wait for
}

// Starts anew with an empty cache, which must outlive its use, as must its table.
extern "C" int64_t optigpu_decoder_begin(void* handle, const Cache* cache, char* message) {
  Decoder& decoder = *static_cast<Decoder*>(handle);
  const std::string wrong = wrong_cache(decoder.engine.program(), *cache);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  return with_memory(message, "There is not enough memory for the attention's scores.", [&] {
    decoder.engine.begin(*cache);
    decoder.has_cache = true;
    return kDone;
  });
}

// Appends `count` tokens to each sequence and chooses `steps` further ones, all but the last of which are appended as well.
extern "C" int64_t optigpu_decoder_run(void* handle, const Request* request, char* message) {
  Decoder& decoder = *static_cast<Decoder*>(handle);
  Engine& engine = decoder.engine;
  std::string wrong = not_ready(decoder);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  if (request->count < 1 || request->steps < 0)
    return say(message, kWrongCall, "The decoder needs at least one token of each sequence.");
  const int64_t total = engine.length() + request->count + (request->steps > 0 ? request->steps - 1 : 0);
  if (total > engine.room()) return say(message, kCannotGoOn, beyond(engine, total - 1));
  if (request->tokens == nullptr && (request->count != 1 || !engine.chosen()))
    return say(message, kWrongCall, "The last call chose no tokens to continue from.");
  wrong = wrong_tokens(engine.program(), request->tokens, request->tokens ? engine.cache().sequences * request->count : 0);
  if (wrong.empty()) wrong = missing_pages(engine.cache(), total);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  return with_memory(message, "There is not enough memory for so many tokens.",
                     [&] { return answer(engine, engine.run(*request), message); });
}

// One pass over tokens of any sequences at positions of their own. What is behind a position is replaced.
extern "C" int64_t optigpu_decoder_advance(void* handle, const Rows* rows, char* message) {
  Decoder& decoder = *static_cast<Decoder*>(handle);
  Engine& engine = decoder.engine;
  std::string wrong = not_ready(decoder);
  if (wrong.empty() && rows->count < 1) wrong = "A pass needs at least one token.";
  if (wrong.empty()) wrong = wrong_tokens(engine.program(), rows->tokens, rows->count);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  wrong = wrong_rows(engine, *rows);
  if (!wrong.empty()) return say(message, kCannotGoOn, wrong);
  return with_memory(message, "There is not enough memory for so many tokens.",
                     [&] { return answer(engine, engine.advance(*rows), message); });
}

extern "C" int64_t optigpu_decoder_length(void* handle) { return static_cast<Decoder*>(handle)->engine.length(); }

// Guesses for a decoder, which must outlive it: by another decoder of the same vocabulary, or from the text where `draft` is null.
extern "C" int64_t optigpu_speculation_create(void* handle, void* draft, int64_t ngram, int64_t lookahead, void** made,
                                              char* message) {
  Decoder& decoder = *static_cast<Decoder*>(handle);
  if (ngram < 1 || lookahead < 1) return say(message, kWrongCall, "Guesses need at least one token to look at and one to guess.");
  if (draft && static_cast<Decoder*>(draft)->engine.program().vocabulary != decoder.engine.program().vocabulary)
    return say(message, kWrongCall, "A draft needs the vocabulary of the decoder that it guesses for.");
  return with_memory(message, "There is not enough memory for the guesses.", [&] {
    std::unique_ptr<Guesser> guesser;
    if (draft)
      guesser.reset(new Draft(static_cast<Decoder*>(draft)->engine));
    else
      guesser.reset(new Lookup(ngram));
    *made = new Guessed{decoder, static_cast<Decoder*>(draft), {decoder.engine, std::move(guesser), lookahead}};
    return kDone;
  });
}

extern "C" void optigpu_speculation_destroy(void* handle) { delete static_cast<Guessed*>(handle); }

// A text begins: `known` tokens, all but the last of which are in the decoder's cache. A draft begins with an empty cache too.
extern "C" int64_t optigpu_speculation_begin(void* handle, const int64_t* text, int64_t known, char* message) {
  Guessed& guessed = *static_cast<Guessed*>(handle);
  std::string wrong = guessed.draft ? not_ready(*guessed.draft) : "";
  if (wrong.empty()) wrong = wrong_tokens(guessed.decoder.engine.program(), text, known);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  return with_memory(message, "There is not enough memory for so many tokens.", [&] {
    return guessed.speculation.begin(text, known) ? kDone : say(message, kCannotGoOn, "The draft's activations are no longer finite.");
  });
}

extern "C" int64_t optigpu_speculation_run(void* handle, Guessing* request, char* message) {
  Guessed& guessed = *static_cast<Guessed*>(handle);
  const Engine& engine = guessed.decoder.engine;
  std::string wrong = not_ready(guessed.decoder);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  if (request->known < 1 || request->least < 1 || request->most < request->least)
    return say(message, kWrongCall, "Guessing needs a text and at least one token to choose.");
  const int64_t last = request->known + request->most - 2;
  if (last >= engine.room()) return say(message, kCannotGoOn, beyond(engine, last));
  wrong = missing_pages(engine.cache(), last + 1);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  return with_memory(message, "There is not enough memory for so many tokens.",
                     [&] { return answer(engine, guessed.speculation.run(*request), message); });
}
