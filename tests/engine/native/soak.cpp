// Runs the decoder on many small random programs, so that a sanitizer can look on. Weights are whatever bytes there are:
// what is checked is that runs agree with each other, whatever the number of threads and however tokens are handed over,
// and that wrong calls are refused.
//
// usage: soak SEED ROUNDS MOST_THREADS; the exit status is 0 when all agreed.

#include "../../../optigpu/ops/decode/cpu/decode.cpp"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <random>

namespace {

std::mt19937_64 numbers;

int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(numbers); }

// Exactly as large as the decoder may read, so that one byte more is seen.
struct Memory {
  std::vector<std::unique_ptr<uint8_t[]>> pieces;

  uint8_t* bytes(int64_t count) {
    pieces.emplace_back(new uint8_t[count]);
    for (int64_t i = 0; i < count; ++i) pieces.back()[i] = static_cast<uint8_t>(numbers());
    return pieces.back().get();
  }
  float* floats(int64_t count, float middle, float spread) {
    float* found = reinterpret_cast<float*>(bytes(count * 4));
    std::normal_distribution<float> normal(middle, spread);
    for (int64_t i = 0; i < count; ++i) found[i] = normal(numbers);
    return found;
  }
  uint16_t* bfloat16s(int64_t count, float middle, float spread) {
    uint16_t* found = reinterpret_cast<uint16_t*>(bytes(count * 2));
    std::normal_distribution<float> normal(middle, spread);
    for (int64_t i = 0; i < count; ++i) found[i] = to_bfloat16(normal(numbers));
    return found;
  }
};

Matrix matrix(Memory& memory, int64_t kind, int64_t outputs, int64_t inputs, int64_t group, bool biased) {
  const int64_t blocks = (outputs + kBlockOutputs - 1) / kBlockOutputs;
  Matrix made{kind, outputs, inputs, kind == kBfloat16Weights ? 0 : group, nullptr, nullptr, nullptr, nullptr};
  if (kind == kBfloat16Weights) {
    made.numbers = reinterpret_cast<uint8_t*>(memory.bfloat16s(blocks * inputs * 16, 0, 0.2f));
  } else {
    made.numbers = memory.bytes(blocks * inputs * (kind == kFourBits ? 8 : 16));
    if (kind == kEightBits)  // -128 is no number that is ever packed
      for (int64_t i = 0; i < blocks * inputs * 16; ++i)
        const_cast<uint8_t*>(made.numbers)[i] = std::max<uint8_t>(made.numbers[i], 1);
    made.scale = reinterpret_cast<int8_t*>(memory.bytes(blocks * (inputs / group) * 16));
    made.unit = memory.bfloat16s(blocks * 16, 0, kind == kFourBits ? 4e-4f : 3e-5f);
  }
  made.bias = biased ? memory.floats(blocks * 16, 0, 0.1f) : nullptr;
  return made;
}

struct Scene {
  Memory memory;
  std::vector<Block> blocks;
  std::vector<std::vector<Matrix>> qkv;
  Program program{};
  bool rotary = false;

  Scene() {
    const int64_t group = int64_t{32} << pick(0, 2), kinds = pick(0, 3);
    program.width = group * pick(1, 2);
    program.kv_heads = pick(1, 3);
    program.heads = program.kv_heads * pick(1, 2);
    program.head_size = group / (program.heads % 3 == 0 ? 1 : 4 / std::min<int64_t>(4, program.heads));
    while (program.heads * program.head_size % group != 0) program.head_size += 4;
    program.inner = group * pick(1, 3);
    program.vocabulary = pick(2, 70);
    program.context = pick(20, 60);
    program.activation = pick(0, 3);
    rotary = pick(0, 1) == 1;
    program.embedding = memory.bfloat16s(program.vocabulary * program.width, 0, 1);
    program.positions = rotary ? nullptr : memory.floats(program.context * program.width, 0, 0.3f);
    program.block_count = pick(1, 2);
    qkv.resize(program.block_count);
    for (int64_t i = 0; i < program.block_count; ++i) blocks.push_back(block(i, group, kinds));
    program.blocks = blocks.data();
    program.final = norm();
    program.head = matrix(memory, kind(kinds), program.vocabulary, program.width, group, pick(0, 1) == 1);
  }

  static int64_t kind(int64_t kinds) { return kinds == 3 ? pick(0, 2) : kinds; }

  Norm norm() {
    const bool layer = pick(0, 1) == 1;
    return {layer ? kLayerNorm : kRmsNorm, memory.floats(program.width, 1, 0.1f),
            layer ? memory.floats(program.width, 0, 0.1f) : nullptr, 1e-5};
  }

  Block block(int64_t index, int64_t group, int64_t kinds) {
    const int64_t heads = program.heads * program.head_size, shared = program.kv_heads * program.head_size;
    const auto make = [&](int64_t outputs, int64_t inputs) {
      return matrix(memory, kind(kinds), outputs, inputs, group, pick(0, 1) == 1);
    };
    if (pick(0, 1) == 1)
      qkv[index] = {make(heads + 2 * shared, program.width)};
    else
      qkv[index] = {make(heads, program.width), make(shared, program.width), make(shared, program.width)};
    Block made{};
    made.first = norm();
    made.qkv = qkv[index].data();
    made.qkv_count = static_cast<int64_t>(qkv[index].size());
    made.output = make(program.width, heads);
    made.second = norm();
    if (pick(0, 1) == 1) made.gate = make(program.inner, program.width);
    made.up = make(program.inner, program.width);
    made.down = make(program.width, program.inner);
    made.scale = 1 / std::sqrt(static_cast<double>(program.head_size));
    made.window = pick(0, 1) == 1 ? pick(1, 9) : 0;
    return made;
  }
};

struct CacheMemory {
  std::unique_ptr<uint8_t[]> keys, values;
  std::unique_ptr<float[]> key_scales, value_scales, cosines, sines;
  Cache cache{};

  CacheMemory(const Program& program, int64_t kind, int64_t sequences, bool rotary) {
    cache.kind = kind;
    cache.sequences = sequences;
    cache.capacity = program.context;
    cache.stored = (program.context + 15) / 16 * 16;
    const int64_t heads = program.block_count * sequences * program.kv_heads, size = kind == kInt8Cache ? 1 : 2;
    keys.reset(new uint8_t[heads * cache.stored * program.head_size * size]);
    values.reset(new uint8_t[heads * cache.stored * ((program.head_size + 15) / 16 * 16) * size]);
    key_scales.reset(new float[heads * cache.stored]);
    value_scales.reset(new float[heads * cache.stored]);
    cache.keys = keys.get();
    cache.values = values.get();
    if (kind == kInt8Cache) {
      cache.key_scales = key_scales.get();
      cache.value_scales = value_scales.get();
    }
    if (!rotary) return;
    const int64_t half = program.head_size / 2;
    cosines.reset(new float[cache.stored * half]);
    sines.reset(new float[cache.stored * half]);
    for (int64_t i = 0; i < cache.stored * half; ++i) {
      cosines[i] = std::cos(static_cast<float>(i / half) / static_cast<float>(1 + i % half));
      sines[i] = std::sin(static_cast<float>(i / half) / static_cast<float>(1 + i % half));
    }
    cache.cosines = cosines.get();
    cache.sines = sines.get();
  }
};

struct Outcomes {
  std::vector<int64_t> tokens;
  std::vector<float> logits;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

void demand(int64_t outcome, int64_t expected, const char* message) {
  if (outcome != expected) fail("outcome " + std::to_string(outcome) + " instead of " + std::to_string(expected) + ": " + message);
}

// A prompt, then `steps` tokens, in one call or each in its own.
Outcomes decoded(const Scene& scene, int64_t threads, int64_t instruction_set, int64_t kv, int64_t sequences,
                 const std::vector<int64_t>& prompt, int64_t steps, bool at_once) {
  char message[kMessage] = "";
  void* decoder = nullptr;
  const std::vector<int64_t> cpus(threads, -1);
  demand(optigpu_decoder_create(&scene.program, threads, cpus.data(), instruction_set, &decoder, message), kDone, message);
  CacheMemory memory(scene.program, kv, sequences, scene.rotary);
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

void compare(int64_t most_threads) {
  const Scene scene;
  const int64_t kv = pick(0, 1), sequences = pick(1, 3), steps = pick(1, 5);
  std::vector<int64_t> prompt(sequences * pick(1, scene.program.context - steps - 1));
  for (int64_t& token : prompt) token = pick(0, scene.program.vocabulary - 1);
  for (int64_t instruction_set : {kPortable, kAvx2, kAvx512Vnni}) {
    if (!cpu_has(instruction_set)) continue;
    const Outcomes one = decoded(scene, 1, instruction_set, kv, sequences, prompt, steps, false);
    const Outcomes many = decoded(scene, pick(2, most_threads), instruction_set, kv, sequences, prompt, steps, true);
    if (one.tokens != many.tokens || one.logits != many.logits) fail("threads changed the result");
    for (float logit : one.logits)
      if (!std::isfinite(logit)) fail("a logit is no number");
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
  numbers.seed(std::strtoull(arguments[1], nullptr, 10));
  for (int64_t left = std::atoll(arguments[2]); left > 0; --left) {
    compare(std::atoll(arguments[3]));
    hand_out(std::atoll(arguments[3]));
  }
  return 0;
}
