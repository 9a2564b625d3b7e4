// Runs the decoder on many small random programs, so that a sanitizer can look on. Weights are whatever bytes there are:
// what is checked is that runs agree with each other, whatever the number of threads and however tokens are handed over,
// that instruction sets agree whose registers are of one length, and that wrong calls are refused.
//
// usage: soak SEED ROUNDS MOST_THREADS; the exit status is 0 when all agreed. Prints the numbers of the instruction sets that
// were run, and a digest of what the portable one computed: any two processors have the same where no product is joined with
// a sum (-ffp-contract=off).

#include "random_decoder.h"

namespace {

std::vector<int64_t> instruction_sets() {
  std::vector<int64_t> found;
  for (int64_t each : {kPortable, kAvx2, kAvx512Vnni, kArmDot, kArmI8mm})
    if (cpu_has(each)) found.push_back(each);
  return found;
}

struct Outcomes {
  std::vector<int64_t> tokens;
  std::vector<float> logits;
  bool operator==(const Outcomes& other) const { return tokens == other.tokens && logits == other.logits; }
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

void demand(int64_t outcome, int64_t expected, const char* message) {
  if (outcome != expected) fail("outcome " + std::to_string(outcome) + " instead of " + std::to_string(expected) + ": " + message);
}

std::vector<int64_t> any_text(const Program& program, int64_t count) {
  std::vector<int64_t> text(count);
  for (int64_t& token : text) token = pick(0, program.vocabulary - 1);
  return text;
}

// A prompt, then `steps` tokens, in one call or each in its own.
Outcomes decoded(const Scene& scene, int64_t threads, int64_t instruction_set, int64_t kv, int64_t sequences,
                 const std::vector<int64_t>& prompt, int64_t steps, bool at_once) {
  char message[kMessage] = "";
  void* decoder = nullptr;
  const std::vector<int64_t> cpus(threads, -1);
  demand(optigpu_decoder_create(&scene.program, threads, cpus.data(), instruction_set, nullptr, &decoder, message), kDone, message);
  CacheMemory memory(scene, kv, sequences);
  demand(optigpu_decoder_begin(decoder, &memory.cache, message), kDone, message);
  const int64_t count = static_cast<int64_t>(prompt.size()) / sequences;
  Outcomes found{std::vector<int64_t>(sequences * steps), std::vector<float>(sequences * scene.program.vocabulary)};
  std::vector<int64_t> last(sequences);
  Request request{prompt.data(), count, 1, 0.7f, 5, last.data(), 1, found.logits.data()};
  demand(optigpu_decoder_run(decoder, &request, message), kDone, message);
  for (int64_t step = 0; step < steps; step += at_once ? steps : 1) {
    const int64_t now = at_once ? steps : 1;
    const std::vector<int64_t> given = last;
    // The decoder knows them as well.
    request = {pick(0, 1) ? given.data() : nullptr, 1, now, 0, 0, found.tokens.data() + step, steps, found.logits.data()};
    demand(optigpu_decoder_run(decoder, &request, message), kDone, message);
    for (int64_t s = 0; s < sequences; ++s) last[s] = found.tokens[s * steps + step + now - 1];
  }
  const int64_t room = scene.program.context - optigpu_decoder_length(decoder);
  std::vector<int64_t> chosen(sequences * (room + 1));
  request = {last.data(), 1, room + 1, 0, 0, chosen.data(), room + 1, found.logits.data()};
  demand(optigpu_decoder_run(decoder, &request, message), kCannotGoOn, "a position beyond the cache was not refused");
  const std::vector<int64_t> unknown(sequences, scene.program.vocabulary);
  request = {unknown.data(), 1, 0, 0, 0, nullptr, 0, found.logits.data()};
  if (room > 0) demand(optigpu_decoder_run(decoder, &request, message), kWrongCall, "an unknown token was not refused");
  request = {nullptr, 2, 0, 0, 0, nullptr, 0, found.logits.data()};
  if (room > 1) demand(optigpu_decoder_run(decoder, &request, message), kWrongCall, "two tokens were gone on from");
  optigpu_decoder_destroy(decoder);
  return found;
}

// What the portable instruction set computes, by FNV-1a.
void add_to(uint64_t& digest) {
  const Scene scene;
  const int64_t kv = pick(0, 2), steps = pick(1, 5);
  const std::vector<int64_t> prompt = any_text(scene.program, pick(1, 9));
  const Outcomes found = decoded(scene, 1, kPortable, kv, 1, prompt, steps, true);
  const auto add = [&](const void* from, size_t count) {
    for (size_t i = 0; i < count; ++i) digest = (digest ^ static_cast<const uint8_t*>(from)[i]) * 0x100000001b3;
  };
  add(found.tokens.data(), found.tokens.size() * sizeof(int64_t));
  add(found.logits.data(), found.logits.size() * sizeof(float));
}

void compare(int64_t most_threads) {
  const Scene scene;
  const int64_t kv = pick(0, 2), sequences = pick(1, 3), steps = pick(1, 5);
  const std::vector<int64_t> prompt = any_text(scene.program, sequences * pick(1, scene.program.context - steps - 1));
  Outcomes portable;
  for (int64_t instruction_set : instruction_sets()) {
    const Outcomes one = decoded(scene, 1, instruction_set, kv, sequences, prompt, steps, false);
    const Outcomes many = decoded(scene, pick(2, most_threads), instruction_set, kv, sequences, prompt, steps, true);
    if (!(one == many)) fail("threads changed the result");
    if (instruction_set == kPortable) portable = one;
    const bool as_long = instruction_set == kArmDot || instruction_set == kArmI8mm;
    if (as_long && !(one == portable)) fail("instruction set " + std::to_string(instruction_set) + " changed the result");
    for (float logit : one.logits)
      if (!std::isfinite(logit)) fail("a logit is no number");
  }
}

// A decoder with its cache, which end together.
struct Decoding {
  char message[kMessage] = "";
  void* decoder = nullptr;
  CacheMemory memory;

  Decoding(const Scene& scene, int64_t threads, int64_t instruction_set, CacheMemory made, const void* beside = nullptr)
      : memory(std::move(made)) {
    const std::vector<int64_t> cpus(threads, -1);
    demand(optigpu_decoder_create(&scene.program, threads, cpus.data(), instruction_set, beside, &decoder, message), kDone, message);
    demand(optigpu_decoder_begin(decoder, &memory.cache, message), kDone, message);
  }
  ~Decoding() { optigpu_decoder_destroy(decoder); }
};

// The logits after each token of a text, one call each.
std::vector<float> stepwise(const Scene& scene, int64_t instruction_set, int64_t kv, const std::vector<int64_t>& text) {
  Decoding alone(scene, 1, instruction_set, CacheMemory(scene, kv, 1));
  const int64_t vocabulary = scene.program.vocabulary, count = static_cast<int64_t>(text.size());
  std::vector<float> logits(count * vocabulary);
  for (int64_t i = 0; i < count; ++i) {
    const Request request{&text[i], 1, 0, 0, 0, nullptr, 0, &logits[i * vocabulary]};
    demand(optigpu_decoder_run(alone.decoder, &request, alone.message), kDone, alone.message);
  }
  return logits;
}

struct Sequence {
  std::vector<int64_t> text;
  std::vector<float> expected;
  int64_t length = 0;
};

// Pages that no sequence has are taken in any order.
void give_pages(CacheMemory& memory, std::vector<int64_t>& free_pages, int64_t sequence, int64_t length) {
  for (int64_t i = 0; i * memory.cache.page < length; ++i) {
    int64_t& page = memory.table[sequence * memory.cache.most + i];
    if (page >= 0) continue;
    std::swap(free_pages[pick(0, static_cast<int64_t>(free_pages.size()) - 1)], free_pages.back());
    page = free_pages.back();
    free_pages.pop_back();
  }
}

// Some tokens of some sequences in one pass; what is wanted must be what each sequence has alone.
void one_pass(const Program& program, Decoding& mixed, std::vector<Sequence>& sequences, std::vector<int64_t>& free_pages) {
  std::vector<int64_t> tokens, owner, position;
  std::vector<uint8_t> wanted;
  std::vector<const float*> expected;
  for (size_t s = 0; s < sequences.size(); ++s) {
    Sequence& sequence = sequences[s];
    const int64_t all = static_cast<int64_t>(sequence.text.size());
    if (pick(0, 3) == 0 || sequence.length == all) continue;
    const int64_t count = pick(1, pick(0, 1) ? 1 : all - sequence.length);
    give_pages(mixed.memory, free_pages, s, sequence.length + count);
    for (int64_t i = 0; i < count; ++i, ++sequence.length) {
      tokens.push_back(sequence.text[sequence.length]);
      owner.push_back(s);
      position.push_back(sequence.length);
      wanted.push_back(pick(0, 1));
      if (wanted.back()) expected.push_back(&sequence.expected[sequence.length * program.vocabulary]);
    }
  }
  if (tokens.empty()) return;
  std::vector<int64_t> chosen(expected.size());
  std::vector<float> logits(expected.size() * program.vocabulary);
  const Rows rows{static_cast<int64_t>(tokens.size()), tokens.data(), owner.data(), position.data(), wanted.data(), chosen.data(),
                  logits.data()};
  demand(optigpu_decoder_advance(mixed.decoder, &rows, mixed.message), kDone, mixed.message);
  for (size_t i = 0; i < expected.size(); ++i) {
    const float* found = &logits[i * program.vocabulary];
    if (!std::equal(found, found + program.vocabulary, expected[i])) fail("beside others a sequence has other logits");
    if (chosen[i] != std::max_element(found, found + program.vocabulary) - found) fail("another token was chosen than the best");
  }
}

// Sequences of different lengths that join, leave, wait and go back, beside each of them alone.
void mix(int64_t most_threads) {
  const Scene scene;
  const int64_t kv = pick(0, 2), count = pick(1, 12), page = 16 * pick(1, 2);
  for (int64_t instruction_set : instruction_sets()) {
    std::vector<Sequence> sequences(count);
    for (Sequence& sequence : sequences) {
      sequence.text = any_text(scene.program, pick(1, scene.program.context));
      sequence.expected = stepwise(scene, instruction_set, kv, sequence.text);
    }
    const int64_t most = (scene.program.context + page - 1) / page, pages = most * count;
    Decoding mixed(scene, pick(1, most_threads), instruction_set, CacheMemory(scene, kv, count, page, pages));
    std::vector<int64_t> free_pages;
    for (int64_t i = 0; i < pages; ++i) free_pages.push_back(i);
    for (int64_t pass = 0; pass < 30; ++pass) {
      one_pass(scene.program, mixed, sequences, free_pages);
      const int64_t one = pick(0, count - 1), act = pick(0, 5);
      if (act == 0) sequences[one].length = pick(0, sequences[one].length);  // takes back what was wrong
      if (act != 1) continue;
      sequences[one].length = 0;
      for (int64_t i = 0; i < most; ++i) {
        int64_t& held = mixed.memory.table[one * most + i];
        if (held >= 0) free_pages.push_back(held);
        held = -1;
      }
    }
    const int64_t token = 0, first = 0, beyond_it = scene.program.context;
    const uint8_t none = 0;
    const Rows late{1, &token, &first, &beyond_it, &none, nullptr, nullptr};
    demand(optigpu_decoder_advance(mixed.decoder, &late, mixed.message), kCannotGoOn, "a position beyond the cache was not refused");
    const Rows other{1, &token, &count, &first, &none, nullptr, nullptr};
    demand(optigpu_decoder_advance(mixed.decoder, &other, mixed.message), kCannotGoOn, "an unknown sequence was not refused");
  }
}

// Guesses change no token, whoever makes them.
void guess(int64_t most_threads) {
  const Scene scene, drafting(scene.program.vocabulary);
  const int64_t kv = pick(0, 2), threads = pick(1, most_threads), lookahead = pick(1, 12);
  const std::vector<int64_t> prompt = any_text(scene.program, pick(1, scene.program.context - 2));
  const int64_t known = static_cast<int64_t>(prompt.size()), steps = scene.program.context - known;
  for (int64_t instruction_set : instruction_sets()) {
    Decoding plain(scene, threads, instruction_set, CacheMemory(scene, kv, 1));
    std::vector<int64_t> expected(steps + 1);
    std::vector<float> logits((lookahead + 1) * scene.program.vocabulary);
    Request request{prompt.data(), known, steps + 1, 0, 0, expected.data(), steps + 1, logits.data()};
    demand(optigpu_decoder_run(plain.decoder, &request, plain.message), kDone, plain.message);
    Decoding decoding(scene, threads, instruction_set, CacheMemory(scene, kv, 1));
    Decoding draft(drafting, threads, instruction_set, CacheMemory(drafting, kv, 1), decoding.decoder);
    void* guessed = nullptr;
    void* drafts = pick(0, 1) ? draft.decoder : nullptr;
    demand(optigpu_speculation_create(decoding.decoder, drafts, pick(1, 4), lookahead, &guessed, plain.message), kDone, plain.message);
    std::vector<int64_t> text = prompt;
    text.resize(known + steps + 1);
    request = {prompt.data(), known, 1, 0, 0, &text[known], 1, logits.data()};
    demand(optigpu_decoder_run(decoding.decoder, &request, decoding.message), kDone, decoding.message);
    demand(optigpu_speculation_begin(guessed, text.data(), known + 1, plain.message), kDone, plain.message);
    Guessing guessing{text.data(), known + 1, 1, steps, logits.data(), 0, 0, 0, 0};
    for (; guessing.most > 0; guessing.known += guessing.chosen, guessing.most -= guessing.chosen) {
      guessing.least = pick(1, guessing.most);
      demand(optigpu_speculation_run(guessed, &guessing, plain.message), kDone, plain.message);
      if (guessing.chosen < guessing.least || guessing.chosen > guessing.most) fail("too few or too many tokens were chosen");
    }
    optigpu_speculation_destroy(guessed);
    if (!std::equal(expected.begin(), expected.end(), text.begin() + known)) fail("guesses changed the text");
  }
}

// Every block of a few products goes to one thread, whoever is slow.
void hand_out(int64_t most_threads) {
  const int64_t threads = pick(1, most_threads), products = pick(1, 40), most = pick(1, 200);
  std::vector<int64_t> counts(products);
  for (int64_t& count : counts) count = pick(0, most);
  std::vector<std::vector<std::atomic<int64_t>>> taken;
  for (int64_t count : counts) taken.emplace_back(count);
  struct Work {
    Shares shares;
    Team team;
    const std::vector<int64_t>& counts;
    std::vector<std::vector<std::atomic<int64_t>>>& taken;
  } all{Shares(threads), Team(std::vector<int64_t>(threads, -1)), counts, taken};
  all.team.run(
      [](void* context, int64_t id) {
        Work& work = *static_cast<Work*>(context);
        for (size_t product = 0; product < work.counts.size(); ++product) {
          work.shares.begin(id);
          const int64_t count = work.counts[product];
          for (Stretch own = work.shares.take(id, count); own.size() > 0; own = work.shares.take(id, count)) {
            for (int64_t block = own.first; block < own.last; ++block) ++work.taken[product][block];
            if (id == 0) sched_yield();
          }
          work.team.meet();
        }
      },
      &all);
  for (const auto& product : taken)
    for (const auto& times : product)
      if (times.load() != 1) fail("a block was taken " + std::to_string(times.load()) + " times");
}

}  // namespace

int main(int, char** arguments) {
  const uint64_t seed = std::strtoull(arguments[1], nullptr, 10);
  const int64_t rounds = std::atoll(arguments[2]), most_threads = std::atoll(arguments[3]);
  numbers.seed(seed);
  for (int64_t round = 0; round < rounds; ++round) {
    compare(most_threads);
    mix(most_threads);
    guess(most_threads);
    hand_out(most_threads);
  }
  for (int64_t each : instruction_sets()) std::printf("%d ", static_cast<int>(each));
  numbers.seed(seed);
  uint64_t digest = 0xcbf29ce484222325;
  for (int64_t round = 0; round < rounds; ++round) add_to(digest);
  std::printf("%016llx\n", static_cast<unsigned long long>(digest));
  return 0;
}
