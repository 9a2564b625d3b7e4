// The decoder as plain C functions, which interface.py calls through ctypes: a call is some microseconds, and a token takes a
// thousand. Each returns 0, or writes one sentence into `message` (kMessage bytes) and returns one of Outcome.

#include <sys/types.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <system_error>

#include "engine.h"

namespace {

enum Outcome : int64_t { kDone = 0, kWrongCall = 1, kNoMemory = 2, kCannotGoOn = 3 };
constexpr int64_t kMessage = 512;

struct Decoder {
  Decoder(const Program& program, std::vector<int64_t> cpus, int64_t instruction_set)
      : engine(program, std::move(cpus), instruction_set), process(getpid()) {}
  Engine engine;
  const pid_t process;  // threads do not follow into a forked child
  bool has_cache = false;
};

int64_t say(char* message, int64_t outcome, const std::string& sentence) {
  std::snprintf(message, kMessage, "%s", sentence.c_str());
  return outcome;
}

std::string wrong_matrix(const Matrix& matrix, int64_t outputs, int64_t inputs, const char* name) {
  if (matrix.outputs != outputs || matrix.inputs != inputs || matrix.numbers == nullptr)
    return std::string(name) + " must be " + std::to_string(outputs) + " x " + std::to_string(inputs) + ", not " +
           std::to_string(matrix.outputs) + " x " + std::to_string(matrix.inputs) + ".";
  const bool whole = matrix.kind == kBfloat16Weights;
  if (!whole && matrix.kind != kFourBits && matrix.kind != kEightBits) return std::string(name) + " must be bf16, w4 or w8.";
  if (whole ? inputs % 4 != 0 : (matrix.group != 32 && matrix.group != 64 && matrix.group != 128) || inputs % matrix.group)
    return std::string(name) + " needs groups of 32, 64 or 128 that divide its " + std::to_string(inputs) +
           " inputs, not of " + std::to_string(matrix.group) + ".";
  return "";
}

// Of matrices that are multiplied in one product.
std::string too_many_outputs(const Matrix* matrices, int64_t count, const char* name) {
  int64_t blocks = 0;
  for (int64_t i = 0; i < count; ++i) blocks += blocks_of(matrices[i]);
  if (blocks <= Shares::kMostBlocks) return "";
  return std::string(name) + " has " + std::to_string(blocks * kBlockOutputs) +
         " outputs; the CPU decoder takes at most " + std::to_string(Shares::kMostBlocks * kBlockOutputs) + ".";
}

std::string wrong_block(const Program& program, const Block& block) {
  const int64_t width = program.width, heads = program.heads * program.head_size;
  const int64_t shared = program.kv_heads * program.head_size;
  std::string wrong;
  if (block.qkv_count == 1) {
    wrong = wrong_matrix(block.qkv[0], heads + 2 * shared, width, "qkv");
  } else if (block.qkv_count == 3) {
    wrong = wrong_matrix(block.qkv[0], heads, width, "q") + wrong_matrix(block.qkv[1], shared, width, "k") +
            wrong_matrix(block.qkv[2], shared, width, "v");
  } else {
    return "qkv must be one or three matrices.";
  }
  if (block.gate.outputs > 0) wrong += wrong_matrix(block.gate, program.inner, width, "gate");
  return wrong + wrong_matrix(block.output, width, heads, "output") + wrong_matrix(block.up, program.inner, width, "up") +
         wrong_matrix(block.down, width, program.inner, "down") + too_many_outputs(block.qkv, block.qkv_count, "qkv") +
         too_many_outputs(&block.output, 1, "output") + too_many_outputs(&block.up, 1, "up") +
         too_many_outputs(&block.down, 1, "down");
}

// Activations are quantized once for all matrices that they meet.
bool groups_differ(const Program& program) {
  int64_t known = 0;
  const auto differs = [&](const Matrix& matrix) {
    if (matrix.kind == kBfloat16Weights || matrix.outputs == 0) return false;
    if (known == 0) known = matrix.group;
    return matrix.group != known;
  };
  bool found = differs(program.head);
  for (int64_t i = 0; i < program.block_count; ++i) {
    const Block& block = program.blocks[i];
    for (int64_t j = 0; j < block.qkv_count; ++j) found = differs(block.qkv[j]) || found;
    found = differs(block.output) || found;
    found = differs(block.gate) || found;
    found = differs(block.up) || found;
    found = differs(block.down) || found;
  }
  return found;
}

std::string wrong_program(const Program& program) {
  if (program.width <= 0 || program.width % 16 != 0 || program.heads <= 0 || program.kv_heads <= 0 ||
      program.heads % program.kv_heads != 0 || program.vocabulary <= 0 || program.inner <= 0 || program.block_count <= 0)
    return "width must be a multiple of 16, heads a multiple of kv_heads, and no size may be 0.";
  if (program.head_size <= 0 || program.head_size % 4 != 0 || program.head_size > kMostHeadSize)
    return "head_size must be a multiple of 4 and at most " + std::to_string(kMostHeadSize) + ", not " +
           std::to_string(program.head_size) + ".";
  for (int64_t i = 0; i < program.block_count; ++i) {
    const std::string wrong = wrong_block(program, program.blocks[i]);
    if (!wrong.empty()) return "Block " + std::to_string(i) + ": " + wrong;
  }
  const std::string wrong = wrong_matrix(program.head, program.vocabulary, program.width, "head") +
                            too_many_outputs(&program.head, 1, "head");
  return wrong.empty() && groups_differ(program) ? "All quantized matrices of a program must have the same group size." : wrong;
}

std::string wrong_tokens(const Program& program, const int64_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (tokens[i] < 0 || tokens[i] >= program.vocabulary)
      return "Token id " + std::to_string(tokens[i]) + " is out of range: this model's ids are 0 to " +
             std::to_string(program.vocabulary - 1) + ".";
  return "";
}

}  // namespace

extern "C" int64_t optigpu_decoder_best_instruction_set() { return best_instruction_set(); }

// `cpus`: for each of `threads` the CPU that it is pinned to, or -1. What `program` points to must outlive the decoder.
extern "C" int64_t optigpu_decoder_create(const Program* program, int64_t threads, const int64_t* cpus,
                                          int64_t instruction_set, void** made, char* message) {
  if (threads < 1) return say(message, kWrongCall, "A decoder needs at least one thread.");
  if (instruction_set == kBest) instruction_set = best_instruction_set();
  if (!cpu_has(instruction_set)) return say(message, kWrongCall, "This CPU lacks the instruction set that was asked for.");
  const std::string wrong = wrong_program(*program);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  try {
    *made = new Decoder(*program, std::vector<int64_t>(cpus, cpus + threads), instruction_set);
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

// Starts anew with an empty cache, which must outlive its use.
extern "C" int64_t optigpu_decoder_begin(void* handle, const Cache* cache, char* message) {
  Decoder& decoder = *static_cast<Decoder*>(handle);
  if (cache->sequences < 1 || cache->capacity < 1 || cache->stored < cache->capacity ||
      cache->stored % kKeyBlock != 0)
    return say(message, kWrongCall, "A cache needs at least one sequence and one token.");
  try {
    decoder.engine.begin(*cache);
    decoder.has_cache = true;
    return kDone;
  } catch (const std::bad_alloc&) {
    return say(message, kNoMemory, "There is not enough memory for the attention's scores.");
  }
}

// Appends `count` tokens to each sequence and chooses `steps` further ones, all but the last of which are appended as well.
extern "C" int64_t optigpu_decoder_run(void* handle, const Request* request, char* message) {
  Decoder& decoder = *static_cast<Decoder*>(handle);
  Engine& engine = decoder.engine;
  if (decoder.process != getpid())
    return say(message, kWrongCall, "A decoder works only in the process that made it, and this one was forked: make another here.");
  if (!decoder.has_cache) return say(message, kWrongCall, "The decoder has no cache yet: call begin first.");
  if (request->count < 1 || request->steps < 0)
    return say(message, kWrongCall, "The decoder needs at least one token of each sequence.");
  const int64_t total = engine.length() + request->count + (request->steps > 0 ? request->steps - 1 : 0);
  const int64_t room = std::min(engine.cache().capacity, engine.program().context);
  if (total > room)
    return say(message, kCannotGoOn, "Position " + std::to_string(total - 1) + " is out of range: the cache has room for " +
                                        std::to_string(room) + " tokens.");
  if (request->tokens == nullptr && (request->count != 1 || !engine.chosen()))
    return say(message, kWrongCall, "The last call chose no tokens to continue from.");
  const int64_t count = request->tokens ? engine.cache().sequences * request->count : 0;
  const std::string wrong = wrong_tokens(engine.program(), request->tokens, count);
  if (!wrong.empty()) return say(message, kWrongCall, wrong);
  const int64_t block = engine.run(*request);
  if (block == Engine::kNoFault) return kDone;
  const bool head = block == engine.program().block_count;
  return say(message, kCannotGoOn, "The activations are no longer finite " +
                                      (head ? std::string("before the head") : "in block " + std::to_string(block)) +
                                      ": the weights or the activations overflow.");
}

extern "C" int64_t optigpu_decoder_length(void* handle) { return static_cast<Decoder*>(handle)->engine.length(); }
