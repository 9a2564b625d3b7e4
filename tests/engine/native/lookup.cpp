// The kernels that look rows up, compiled as the decoder's library is.

#include "../../../optigpu/ops/decode/cpu/instruction_sets.h"

extern "C" void look_up(const Program* program, int64_t instruction_set, int64_t token, int64_t position, float* x) {
  kernels_for(instruction_set).embed(*program, token, position, x);
}
