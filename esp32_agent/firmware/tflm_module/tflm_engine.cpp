#include "tflm_engine.h"

#include <stdlib.h>

#include <new>

#include "tensorflow/lite/micro/micro_interpreter.h"
#include "tensorflow/lite/micro/micro_mutable_op_resolver.h"
#include "tensorflow/lite/schema/schema_generated.h"

#ifdef ESP_PLATFORM
#include "esp_heap_caps.h"
#endif

namespace {

constexpr size_t kAlignment = 16;
constexpr size_t kShortestModel = 32;
constexpr unsigned kOperators = 24;
using Resolver = tflite::MicroMutableOpResolver<kOperators>;

// What `optigpu convert` accepts. A kernel that is named here is linked in, so that this list is the module's size.
bool AddOperators(Resolver &resolver) {
    return resolver.AddAdd() == kTfLiteOk && resolver.AddAveragePool2D() == kTfLiteOk &&
           resolver.AddConcatenation() == kTfLiteOk && resolver.AddConv2D() == kTfLiteOk &&
           resolver.AddDepthwiseConv2D() == kTfLiteOk && resolver.AddDequantize() == kTfLiteOk &&
           resolver.AddFullyConnected() == kTfLiteOk && resolver.AddHardSwish() == kTfLiteOk &&
           resolver.AddLogistic() == kTfLiteOk && resolver.AddMaxPool2D() == kTfLiteOk &&
           resolver.AddMean() == kTfLiteOk && resolver.AddMul() == kTfLiteOk && resolver.AddPack() == kTfLiteOk &&
           resolver.AddPad() == kTfLiteOk && resolver.AddQuantize() == kTfLiteOk && resolver.AddRelu() == kTfLiteOk &&
           resolver.AddRelu6() == kTfLiteOk && resolver.AddReshape() == kTfLiteOk &&
           resolver.AddResizeNearestNeighbor() == kTfLiteOk && resolver.AddShape() == kTfLiteOk &&
           resolver.AddSoftmax() == kTfLiteOk && resolver.AddStridedSlice() == kTfLiteOk &&
           resolver.AddSub() == kTfLiteOk && resolver.AddTranspose() == kTfLiteOk;
}

void *AllocateArena(size_t bytes, bool psram) {
#ifdef ESP_PLATFORM
    const uint32_t place = psram ? MALLOC_CAP_SPIRAM : MALLOC_CAP_INTERNAL;
    return heap_caps_aligned_alloc(kAlignment, bytes, place | MALLOC_CAP_8BIT);
#else
    (void)psram;
    return aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
#endif
}

void FreeArena(void *arena) {
#ifdef ESP_PLATFORM
    heap_caps_free(arena);
#else
    free(arena);
#endif
}

}  // namespace

struct tflm_engine {
    Resolver resolver;
    void *arena = nullptr;
    tflite::MicroInterpreter *interpreter = nullptr;

    ~tflm_engine() {
        delete interpreter;
        FreeArena(arena);
    }
};

namespace {

const char *CheckModel(const uint8_t *model, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(model) % kAlignment != 0) {
        return "The model's bytes are not aligned to 16.";
    }
    if (bytes < kShortestModel || !tflite::ModelBufferHasIdentifier(model)) {
        return "The bytes are not a TFLite model.";
    }
    flatbuffers::Verifier verifier(model, bytes);
    if (!tflite::VerifyModelBuffer(verifier)) {
        return "The model is truncated or damaged.";
    }
    if (tflite::GetModel(model)->version() != TFLITE_SCHEMA_VERSION) {
        return "The model has another version of the TFLite schema.";
    }
    return nullptr;
}

const char *CheckTensors(tflite::MicroInterpreter &interpreter) {
    if (interpreter.inputs_size() != 1 || interpreter.outputs_size() != 1) {
        return "The model has not one input and one output.";
    }
    if (interpreter.input(0)->type != kTfLiteInt8 || interpreter.output(0)->type != kTfLiteInt8) {
        return "The model's input and output are not int8.";
    }
    return nullptr;
}

const char *Load(tflm_engine &engine, const uint8_t *model, size_t model_bytes, size_t arena_bytes, bool psram) {
    if (const char *reason = CheckModel(model, model_bytes)) {
        return reason;
    }
    if (!AddOperators(engine.resolver)) {
        return "The operators could not be registered.";
    }
    engine.arena = AllocateArena(arena_bytes, psram);
    if (engine.arena == nullptr) {
        return psram ? "PSRAM has no room for the arena." : "Internal SRAM has no room for the arena.";
    }
    engine.interpreter = new (std::nothrow) tflite::MicroInterpreter(
        tflite::GetModel(model), engine.resolver, static_cast<uint8_t *>(engine.arena), arena_bytes);
    if (engine.interpreter == nullptr) {
        return "The heap has no room for the interpreter.";
    }
    if (engine.interpreter->AllocateTensors() != kTfLiteOk) {
        return "The arena is too small for the model, or an operator is missing.";
    }
    return CheckTensors(*engine.interpreter);
}

}  // namespace

extern "C" {

tflm_engine_t *tflm_engine_new(const uint8_t *model, size_t model_bytes, size_t arena_bytes, int psram,
                               const char **error) {
    tflm_engine *engine = new (std::nothrow) tflm_engine;
    if (engine == nullptr) {
        *error = "The heap has no room for the engine.";
        return nullptr;
    }
    *error = Load(*engine, model, model_bytes, arena_bytes, psram != 0);
    if (*error != nullptr) {
        delete engine;
        return nullptr;
    }
    return engine;
}

void tflm_engine_delete(tflm_engine_t *engine) { delete engine; }

int8_t *tflm_engine_input(tflm_engine_t *engine, size_t *bytes) {
    TfLiteTensor *tensor = engine->interpreter->input(0);
    *bytes = tensor->bytes;
    return tensor->data.int8;
}

const int8_t *tflm_engine_output(tflm_engine_t *engine, size_t *bytes) {
    TfLiteTensor *tensor = engine->interpreter->output(0);
    *bytes = tensor->bytes;
    return tensor->data.int8;
}

int tflm_engine_invoke(tflm_engine_t *engine) { return engine->interpreter->Invoke() == kTfLiteOk ? 0 : 1; }

size_t tflm_engine_arena_used(const tflm_engine_t *engine) { return engine->interpreter->arena_used_bytes(); }

}  // extern "C"
