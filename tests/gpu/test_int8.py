"""int8_weight_only on an NVIDIA GPU: our Triton kernels, which never widen a whole matrix."""

from typing import Any

import pytest

from optigpu.ops.linear.int8_linear import (
    OLDEST_CAPABILITY,
    ROWS_WITHOUT_MATRIX_UNITS,
    int8_linear,
    int8_linear_backend,
    pack,
    quantize_rows,
)
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from tests.engine.decoded import NEW_TOKENS
from tests.engine.tiny_models import FAMILIES, prompt
from tests.gpu.cuda_models import on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]
SHAPES = [(770, 130), (3072, 768), (1, 1), (17, 3), (64, 770), (14336, 64), (40_000, 9), (4096, 4097)]
"""Inner and outputs: multiples of what the kernels take at a time, remainders, more inputs than registers hold."""


def is_ours(rows: int) -> bool:
    """Whether a product of so many rows goes to our kernels; torch's widens the weights and rounds its sums."""
    import torch

    from optigpu.ops.launch import MATRIX_UNITS

    known = torch.cuda.get_device_capability()
    return known >= MATRIX_UNITS or (known >= OLDEST_CAPABILITY and rows <= ROWS_WITHOUT_MATRIX_UNITS)


def test_the_kernels_are_triton_s_where_it_compiles() -> None:
    import torch

    known = torch.cuda.get_device_capability() >= OLDEST_CAPABILITY
    assert int8_linear_backend("cuda") == ("triton" if known else "torch-dequantize")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 64, 130])
@pytest.mark.parametrize(("inner", "outputs"), SHAPES)
def test_products_are_close_to_float64(inner: int, outputs: int, rows: int, dtype: str) -> None:
    """Tensor cores truncate what they add, so their sums may be off by twice a rounding."""
    import torch

    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    q, scale = quantize_rows(torch.randn(outputs, inner, device="cuda"))
    x = torch.randn(rows, inner, device="cuda").to(kind)
    for bias in (None, torch.randn(outputs, device="cuda")):
        y = int8_linear(x, pack(q), scale, bias)
        exact = (x.double() @ q.double().T) * scale.double()
        size = (x.double().abs() @ q.double().abs().T) * scale.double()
        if bias is not None:
            exact, size = exact + bias.double(), size + bias.double().abs()
        if is_ours(rows):
            allowed = size * (inner + 2) * 2**-23 + exact.abs() * torch.finfo(kind).eps / 2
        else:
            allowed = size * ((inner + 2) * 2**-23 + 4 * torch.finfo(kind).eps)
        assert y.dtype == kind
        assert bool(((y.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_no_product_of_ours_widens_the_weights(rows: int) -> None:
    import torch

    q, scale = quantize_rows(torch.randn(8192, 4096, device="cuda"))
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    int8_linear(x, q, scale)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    int8_linear(x, q, scale)
    torch.cuda.synchronize()
    assert (torch.cuda.max_memory_allocated() - before < q.numel() / 8) == is_ours(rows)


def test_a_recorded_product_gives_what_a_plain_one_does() -> None:
    import torch

    q, scale = quantize_rows(torch.randn(96, 64, device="cuda"))
    for rows in (1, 20):
        x = torch.randn(rows, 64, device="cuda")
        plain = int8_linear(x, q, scale)  # also compiles the kernel
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = int8_linear(x, q, scale)
        x.mul_(2)
        graph.replay()
        assert torch.equal(recorded, 2 * plain)


def test_torch_compile_looks_into_the_operator() -> None:
    import torch
    from torch.profiler import ProfilerActivity, profile

    q, scale = quantize_rows(torch.randn(768, 768, device="cuda"))
    x = torch.randn(1, 768, device="cuda")

    def step() -> Any:
        return int8_linear(torch.relu(x), q, scale)

    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(), step())
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        compiled()
    names = {event.key for event in profiler.key_averages()}
    assert any("_int8_gemv" in name for name in names)
    assert "optigpu::triton_int8_linear" not in names


@pytest.mark.parametrize("half", [None, Bf16(), Fp16()], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_step_gives_the_tokens_of_a_plain_one(family: str, half: Technique | None) -> None:
    others = [half] if half else []
    plain = on_cuda(f"path:{family}", Int8WeightOnly(), *others)
    assert plain.notes.facts["int8_backend"] == int8_linear_backend("cuda")
    tokens = plain.generate(prompt().cuda(), NEW_TOKENS).tokens
    compiled = on_cuda(f"path:{family}", Int8WeightOnly(), TorchCompile(mode="reduce-overhead"), *others)
    assert compiled.generate(prompt().cuda(), NEW_TOKENS).tokens.equal(tokens)
