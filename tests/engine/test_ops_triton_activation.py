"""The Triton kernels of bias_gelu and swiglu without a GPU: interpreted against float64, and compiled for one.

In separate processes, because a kernel is interpreted or not from the moment that its module is imported.
"""

import pytest

from tests.engine.triton_processes import assert_right

INTERPRETED = """
import torch
from optigpu.ops.activation.triton_activation import triton_bias_gelu, triton_swiglu
from tests.engine.test_ops_fused_activation import (
    FORMS, TYPES, UNIT, assert_within, exact_gelu, exact_swiglu, normal, summed
)

def assert_computed(x, pairs, bias, two):
    # The interpreter cuts a float32 off to bfloat16, where a GPU rounds it.
    cut = torch.finfo(x.dtype).eps if x.dtype == torch.bfloat16 else 0.0
    v = summed(x, bias)
    for form in FORMS:
        y = triton_bias_gelu(x, bias, form == "tanh")
        exact, _ = exact_gelu(v, form)
        assert y.dtype == x.dtype
        # erf's tail is what is left of a difference from one.
        assert_within(y, (exact, 4 * UNIT * v.double().abs() + cut * exact.abs()))
    exact, arithmetic = exact_swiglu(summed(pairs, two))
    assert_within(triton_swiglu(pairs, two), (exact, arithmetic + cut * exact.abs()))

for index, shape in enumerate([(1, 1), (3, 17), (2, 2, 1030)]):
    for place, dtype in enumerate(TYPES):
        x, pairs = normal(*shape, dtype=dtype), normal(*shape[:-1], 2 * shape[-1], dtype=dtype)
        biases = [normal(r.shape[-1], dtype=dtype, seed=1) for r in (x, pairs)]
        assert_computed(x, pairs, *(biases if (index + place) % 2 == 0 else (None, None)))
assert triton_bias_gelu(normal(0, 4), None, True).shape == (0, 4)
assert triton_swiglu(normal(0, 4), None).shape == (0, 2)
print("right")
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from optigpu.ops.activation import triton_activation as ours

for kernel in (ours._bias_gelu_kernel, ours._swiglu_kernel):
    for element, flag in (("fp32", True), ("bf16", False), ("fp16", True)):
        chosen = {"HAS_BIAS": flag, "ACTIVATION": "gelu_tanh" if flag else "gelu", "BLOCK": ours.BLOCK}
        constants = {p.name: chosen[p.name] for p in kernel.params if p.is_constexpr}
        types = {name: "*" + element for name in ("x", "bias", "y")}
        signature = {p.name: types.get(p.name, "i32") for p in kernel.params}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
print("right")
"""


@pytest.mark.slow
def test_the_kernels_agree_with_float64() -> None:
    assert_right(INTERPRETED, {"TRITON_INTERPRET": "1"})


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """Down to machine code for a Hopper GPU; Triton brings the assembler, and keeps what it has compiled."""
    assert_right(COMPILED, {})
