// One prompt or one step of decoding on one thread, in a function that a counter of instructions can look for.
//
// usage: steps INSTRUCTION_SET FAMILY KIND WHAT, the family being gpt2 or llama and what is done being prompt or step.

#include "random_decoder.h"

namespace {

constexpr int64_t kGroup = 32, kPrompt = 16;

Program shape(Family family) {
  Program made{};
  made.width = 256;
  made.heads = 4;
  made.kv_heads = family == Family::kLlama ? 2 : 4;
  made.head_size = 64;
  made.inner = family == Family::kLlama ? 768 : 1024;
  made.vocabulary = 1000;
  made.context = 64;
  made.activation = family == Family::kLlama ? kSilu : kGeluTanh;
  made.block_count = 1;
  return made;
}

void demand(int64_t outcome, const char* message) {
  if (outcome == kDone) return;
  std::fprintf(stderr, "%s\n", message);
  std::exit(1);
}

}  // namespace

extern "C" __attribute__((noinline)) int64_t counted(void* decoder, const Request* request, char* message) {
  return optigpu_decoder_run(decoder, request, message);
}

int main(int, char** arguments) {
  numbers.seed(1);
  const int64_t instruction_set = std::atoll(arguments[1]), kind = std::atoll(arguments[3]);
  const Family family = arguments[2] == std::string("llama") ? Family::kLlama : Family::kGpt2;
  const Scene scene(shape(family), family, kind, kGroup);
  CacheMemory memory(scene, kBfloat16Cache, 1);
  char message[kMessage] = "";
  void* decoder = nullptr;
  const int64_t cpu = -1;
  demand(optigpu_decoder_create(&scene.program, 1, &cpu, instruction_set, nullptr, &decoder, message), message);
  demand(optigpu_decoder_begin(decoder, &memory.cache, message), message);
  std::vector<int64_t> prompt(kPrompt), chosen(1);
  for (int64_t i = 0; i < kPrompt; ++i) prompt[i] = i;
  std::vector<float> logits(scene.program.vocabulary);
  const Request first{prompt.data(), kPrompt, 1, 0, 0, chosen.data(), 1, logits.data()};
  const Request next{nullptr, 1, 1, 0, 0, chosen.data(), 1, logits.data()};
  const bool step = arguments[4] == std::string("step");
  demand(step ? optigpu_decoder_run(decoder, &first, message) : counted(decoder, &first, message), message);
  if (step) demand(counted(decoder, &next, message), message);
  optigpu_decoder_destroy(decoder);
  return 0;
}
