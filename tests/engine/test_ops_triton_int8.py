"""The Triton kernels of int8_linear without a GPU: interpreted against float64, and as torch traces the operator.

In separate processes, because a kernel is interpreted or not from the moment that its module is imported.
"""

import pytest

from tests.engine.triton_processes import assert_right

INTERPRETED = """
import itertools
import torch
from optigpu.ops.launch import LaunchTarget
from optigpu.ops.linear.triton_int8 import int8_call, triton_int8_linear
from tests.engine.linear_operands import TYPES, activations, int8_layer

def target_for(dtype):
    # Divided as on a GPU with few multiprocessors. The interpreter multiplies bfloat16 as the integers that it keeps.
    return LaunchTarget(warps=24, dp4a=True, matrix_units=dtype != torch.bfloat16)

SHAPES = [  # inner, outputs
    (770, 130), (3072, 50), (1, 1), (17, 3), (64, 770), (1, 40), (768, 1)
]
ROWS = (1, 3, 4, 17)

def assert_near(y, x, q, scale, bias):
    assert (y.dtype, y.shape) == (x.dtype, (*x.shape[:-1], q.shape[0]))
    exact, size = (x.double() @ q.double().T) * scale.double(), (x.double().abs() @ q.double().abs().T) * scale.double()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    # The interpreter cuts a float32 off to bfloat16, where a GPU rounds it.
    rounding = torch.finfo(y.dtype).eps / (1 if y.dtype == torch.bfloat16 else 2)
    allowed = size * (x.shape[-1] + 2) * 2**-24 + exact.abs() * rounding
    assert torch.all((y.double() - exact).abs() <= allowed), (x.shape, q.shape, x.dtype)

def call_of(x, q, scale, bias):
    y = torch.full((x.shape[0], q.shape[0]), torch.nan, dtype=x.dtype)
    return int8_call(x, q, scale, bias, y, target_for(x.dtype)), y

for index, ((inner, outputs), rows) in enumerate(itertools.product(SHAPES, ROWS)):
    q, scale, bias = int8_layer(inner, outputs)
    for place, dtype in enumerate(TYPES):
        x = activations(rows, inner, dtype=dtype)
        chosen = bias if (index + place) % 2 else None
        call, y = call_of(x, q, scale, chosen)
        assert call.kernel.__name__ == ("_int8_gemv" if rows <= 4 else "_int8_gemm")
        call.run()
        assert_near(y, x, q, scale, chosen)
q, scale, _ = int8_layer(40_000, 3)
call, _ = call_of(activations(1, 40_000), q, scale, None)
assert call.kernel.__name__ == "_int8_gemm"  # more inputs than registers hold

q, scale, bias = int8_layer(96, 40)
extremes = torch.full((5, 64), 127, dtype=torch.int8)
extremes[1::2] = -128
for rows in (2, 20):
    x = activations(rows, 64)
    assert_near(triton_int8_linear(x, extremes, torch.ones(5), None), x, extremes, torch.ones(5), None)
x = activations(2, 3, 96)
y = triton_int8_linear(x, q, scale, bias)
assert y.shape == (2, 3, 40)
assert torch.equal(triton_int8_linear(x.transpose(0, 1), q, scale, bias), y.transpose(0, 1))
assert triton_int8_linear(x[:0], q, scale, bias).shape == (0, 3, 40)
for rows in (2, 20):
    x = activations(rows, 96)
    x[0, 7], x[1, 3] = torch.nan, torch.inf
    y = triton_int8_linear(x, q, scale, None)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert y[2:].isfinite().all()
print("right")
"""

TRACED = """
import torch
from torch._library.triton import get_triton_kernels_for_op
from torch._subclasses import FakeTensorMode
import optigpu.ops.linear.triton_int8 as ours

names = {kernel.__name__ for kernel in get_triton_kernels_for_op("optigpu::triton_int8_linear")}
assert names == {"_int8_gemv", "_int8_gemm"}, names
for rows, dtype in ((1, torch.bfloat16), (40, torch.float32)):
    with FakeTensorMode():
        x, q = torch.empty(2, rows, 64, dtype=dtype), torch.empty(48, 64, dtype=torch.int8)
        y = ours.triton_int8_linear(x, q, torch.empty(48), None)
    assert (y.shape, y.dtype) == ((2, rows, 48), dtype)

class Layer(torch.nn.Module):
    def forward(self, x, q, scale, bias):
        return ours.triton_int8_linear(torch.relu(x), q, scale, bias) * 2

arguments = torch.randn(3, 64), torch.ones(48, 64, dtype=torch.int8), torch.ones(48), torch.ones(48)
exported = torch.export.export(Layer(), arguments)
assert "optigpu.triton_int8_linear" in exported.graph_module.code, exported.graph_module.code

from torch._dynamo.backends.common import aot_autograd

seen = []

def compiler(graph, inputs):
    seen.append(graph.code)
    (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in outputs]
    return lambda *given: [torch.zeros(value.shape, dtype=value.dtype) for value in values]

torch.compile(Layer(), fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(*arguments)
assert "triton_kernel_wrapper" in seen[0], seen[0]
print("right")
"""


@pytest.mark.long
def test_the_kernels_agree_with_float64() -> None:
    assert_right(INTERPRETED, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


@pytest.mark.long
def test_torch_traces_the_operator_and_sees_its_launch() -> None:
    """With no GPU, by a compiler that runs nothing."""
    assert_right(TRACED, {"TRITON_INTERPRET": "0"})
