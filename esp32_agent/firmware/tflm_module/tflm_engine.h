// A TFLite Micro interpreter behind plain C functions: for MicroPython's module, and for the serial firmware.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tflm_engine tflm_engine_t;

// Loads a model with one input and one output tensor of int8. The model's bytes are not copied: they stay where they are
// for as long as the engine lives. The arena lies in PSRAM or in internal SRAM. Returns NULL with a sentence in *error.
tflm_engine_t *tflm_engine_new(const uint8_t *model, size_t model_bytes, size_t arena_bytes, int psram,
                               const char **error);
void tflm_engine_delete(tflm_engine_t *engine);

// The tensors lie in the arena, whose memory an inference uses again: fill the input before each one.
int8_t *tflm_engine_input(tflm_engine_t *engine, size_t *bytes);
const int8_t *tflm_engine_output(tflm_engine_t *engine, size_t *bytes);

// 0, or 1 if an operator failed.
int tflm_engine_invoke(tflm_engine_t *engine);
size_t tflm_engine_arena_used(const tflm_engine_t *engine);

#ifdef __cplusplus
}
#endif
