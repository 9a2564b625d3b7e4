"""Products in TF32, in 8-bit floats and in int8 on an NVIDIA GPU, and the hybrid of bits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.linear.int8_dynamic import int8_dynamic, int8_dynamic_backend, pack_dynamic, quantize_tokens
from optigpu.ops.linear.int8_linear import quantize_rows
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp8 import Fp8
from optigpu.techniques.quantization.fp8.layers import Fp8Linear, quantize_fp8
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.techniques.quantization.tf32 import Tf32
from optigpu.vocabulary import DeviceKind
from tests.engine.decoded import NEW_TOKENS
from tests.engine.tiny_models import FAMILIES, ignore, prompt
from tests.gpu.cuda_models import on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]
SHAPES = [(1, 64, 48), (1, 1, 1), (3, 17, 5), (17, 96, 33), (40, 131, 50257 % 100)]
"""Rows, inner, outputs: multiples of what the operators take, and remainders."""


@pytest.fixture
def restored() -> Iterator[None]:
    cudnn = torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.usefixtures("restored")
def test_tf32_rounds_what_goes_into_a_product_to_11_bits_and_no_further() -> None:
    """The bound is (n u + 4 v) |A||B|, u = 2^-24 for sums and v = 2^-11 for what goes in (Higham, 2002, 3.5)."""
    reason = Tf32().check(probe(), DeviceKind.CUDA, None)
    a, b = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def error() -> float:
        return float((((a @ b).double() - exact).abs() / size).max())

    plain = error()
    model: Any = torch.nn.Module()
    Tf32().modules(model, Notes())
    rounded = error()
    assert plain <= 1024 * 2.0**-24
    assert rounded <= 1024 * 2.0**-24 + 4 * 2.0**-11
    assert (rounded > 10 * plain) == (reason is None)


@pytest.mark.usefixtures("restored")
def test_a_compiled_step_runs_in_tf32() -> None:
    runtime = on_cuda("path:llama", Tf32(), TorchCompile(mode="reduce-overhead"))
    assert runtime.generate(prompt().cuda(), NEW_TOKENS).tokens.shape == (2, NEW_TOKENS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "outputs"), SHAPES)
def test_int8_products_are_exact(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> None:
    assert int8_dynamic_backend("cuda") == "torch-int_mm"
    q, scale = quantize_rows(torch.randn(outputs, inner, device="cuda"))
    x, bias = torch.randn(rows, inner, device="cuda").to(dtype), torch.randn(outputs, device="cuda")
    y = int8_dynamic(x, pack_dynamic(q), scale, bias)
    tokens, token_scale = quantize_tokens(x)
    product = (tokens.double() @ q.double().T) * token_scale.double() * scale.double()
    exact = product + bias.double()
    allowed = 4 * 2**-24 * (product.abs() + exact.abs()) + exact.abs() * torch.finfo(dtype).eps / 2
    assert y.dtype == dtype
    assert torch.all((y.double() - exact).abs() <= allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "outputs"), SHAPES)
def test_fp8_products_are_close_to_float64(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> None:
    """The tensor cores of Hopper add with 14 bits at the least before they add in float32."""
    weight, bias = torch.randn(outputs, inner, device="cuda"), torch.randn(outputs, device="cuda")
    x = torch.randn(rows, inner, device="cuda").to(dtype)
    if Fp8().check(probe(), DeviceKind.CUDA, None) is not None:
        with pytest.raises(RuntimeError):
            Fp8Linear(weight, bias)(x)
        return
    y = Fp8Linear(weight, bias)(x)
    (q, q_scale), (w, w_scale) = quantize_fp8(x), quantize_fp8(weight)
    scales = q_scale.double()[:, None] * w_scale.double()
    exact = (q.double() @ w.double().T) * scales + bias.double()
    size = (q.double().abs() @ w.double().abs().T) * scales + bias.double().abs()
    allowed = size * (inner * 2.0**-24 + 2.0**-13) + exact.abs() * torch.finfo(dtype).eps / 2
    assert y.dtype == dtype
    assert torch.all((y.double() - exact).abs() <= allowed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "technique",
    [Int8Dynamic(), Int8Hybrid(), Int8Hybrid(bits=4), Int8Dynamic(smoothing=0.5)],
    ids=["dynamic", "hybrid", "hybrid4", "smoothed"],
)
def test_a_quantized_model_gives_on_a_gpu_what_it_gives_on_a_cpu(family: str, technique: Technique) -> None:
    """Up to the flips of roundings that another order of sums brings, which are much smaller than what was rounded."""
    runtime, plain = on_cuda(f"path:{family}", technique), on_cuda(f"path:{family}")
    there = DecodingModel(
        f"path:{family}", resolve((technique,), "generate"), DeviceKind.CPU, seed=0, progress=ignore
    )
    exact = plain.logits(prompt().cuda()).cpu()
    rounding = (there.logits(prompt()) - exact).abs().mean()
    difference = (runtime.logits(prompt().cuda()).cpu() - there.logits(prompt())).abs().mean()
    assert difference < rounding / 3
    assert runtime.generate(prompt().cuda(), NEW_TOKENS).tokens.shape == (2, NEW_TOKENS)
    assert weight_bytes(runtime.model) < weight_bytes(plain.model)


@pytest.mark.parametrize("other", [None, Bf16()], ids=["fp32", "bf16"])
@pytest.mark.parametrize("technique", [Int8Dynamic(), Int8Hybrid()], ids=lambda technique: technique.name)
def test_a_compiled_step_gives_the_tokens_of_a_plain_one(technique: Technique, other: Any) -> None:
    others = [other] if other else []
    plain = on_cuda("path:qwen2", technique, *others).generate(prompt().cuda(), NEW_TOKENS).tokens
    compiled = on_cuda("path:qwen2", technique, TorchCompile(mode="reduce-overhead"), *others)
    assert compiled.generate(prompt().cuda(), NEW_TOKENS).tokens.equal(plain)


def test_fp8_decodes_where_the_hardware_has_it_and_says_why_elsewhere() -> None:
    reason = Fp8().check(probe(), DeviceKind.CUDA, None)
    if reason is not None:
        assert "compute capability 8.9" in reason
        return
    runtime, plain = on_cuda("path:llama", Bf16(), Fp8()), on_cuda("path:llama", Bf16())
    error = (runtime.logits(prompt().cuda()) - plain.logits(prompt().cuda())).abs().mean()
    assert 0 < error < plain.logits(prompt().cuda()).std() / 4
    compiled = on_cuda("path:llama", Bf16(), Fp8(), TorchCompile(mode="reduce-overhead"))
    assert compiled.generate(prompt().cuda(), NEW_TOKENS).tokens.shape == (2, NEW_TOKENS)
