"""The Triton kernels of bias_gelu and swiglu without a GPU: interpreted against float64.

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


@pytest.mark.long
def test_the_kernels_agree_with_float64() -> None:
    assert_right(INTERPRETED, {"TRITON_INTERPRET": "1"})
