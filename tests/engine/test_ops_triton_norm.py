"""The Triton kernel of the fused norms without a GPU: interpreted against float64.

In separate processes, because a kernel is interpreted or not from the moment that its module is imported.
"""

import pytest

from tests.engine.triton_processes import assert_right

INTERPRETED = """
import torch
from optigpu.ops.norm.triton_norm import triton_add_norm
from tests.engine.test_ops_fused_norm import EPS, SHAPES, TYPES, assert_norm_of, operands

def assert_right(x, residual, weight, bias, is_rms):
    normed, summed = triton_add_norm(x, residual, weight, bias, EPS, is_rms)
    # The interpreter cuts a float32 off to bfloat16, where a GPU rounds it.
    rounding = torch.finfo(x.dtype).eps / (1 if x.dtype == torch.bfloat16 else 2)
    exact = x.double() if residual is None else x.double() + residual.double()
    assert torch.all((summed.double() - exact).abs() <= exact.abs() * rounding)
    assert summed is x or residual is not None
    assert (normed.dtype, normed.shape) == (x.dtype, x.shape)
    assert_norm_of(normed, summed, weight, bias, is_rms, rounding)

for index, shape in enumerate(SHAPES[:-1]):
    for dtype in (torch.float32, TYPES[1 + index % 2]):
        x, residual, weight, bias = operands(shape, dtype)
        assert_right(x, residual, weight, bias, False)
        assert_right(x, residual, weight, None, True)
        assert_right(x, None, None, None, False)
        assert_right(x, None, weight, None, True)
x = 1e4 + operands((3, 1000), torch.float32)[0]
assert_right(x, None, None, None, False)
turned = operands((6, 20), torch.float32)[0].T
assert_right(turned, turned, None, None, True)
assert triton_add_norm(x[:0], x[:0], None, None, EPS, True)[1].shape == (0, 1000)
print("right")
"""


@pytest.mark.slow
def test_the_kernel_agrees_with_float64() -> None:
    assert_right(INTERPRETED, {"TRITON_INTERPRET": "1"})
