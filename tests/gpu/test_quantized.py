"""Products of 4, 8 and 16 bits on an NVIDIA GPU, and models that compute with them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int4_linear import OLDEST_CAPABILITY as INT4_CAPABILITY
from optigpu.ops.linear.int4_linear import int4_linear, int4_linear_backend, pack_int4
from optigpu.ops.linear.int8_dynamic import int8_dynamic, int8_dynamic_backend, pack_dynamic, quantize_tokens
from optigpu.ops.linear.int8_linear import OLDEST_CAPABILITY as INT8_CAPABILITY
from optigpu.ops.linear.int8_linear import (
    ROWS_WITHOUT_MATRIX_UNITS,
    int8_linear,
    int8_linear_backend,
    pack,
    quantize_rows,
)
from optigpu.surgery.fp8_layers import Fp8Linear, quantize_fp8
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.awq import Awq
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp8 import Fp8
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.gptq import Gptq
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.quantization.llm_int8 import LlmInt8
from optigpu.techniques.quantization.nf4 import Nf4
from optigpu.techniques.quantization.tf32 import Tf32
from optigpu.vocabulary import DeviceKind
from tests.engine.decoded import NEW_TOKENS, assert_right, assert_right_within
from tests.engine.packed_models import Layout, write_packed_tiny
from tests.engine.rounding import in_float64, rounding_bound
from tests.engine.test_techniques_bitsandbytes import (
    activation_bound,
    dequantized,
    replaced_in,
    rounded_to_int8,
    twins,
)
from tests.engine.test_techniques_products import restored
from tests.engine.tiny_models import FAMILIES, ignore, prompt
from tests.gpu.cuda_models import calls_of, on_cuda

__all__ = ["restored"]  # the fixture
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]

# ---- int8_weight_only: our Triton kernels, which never widen a whole matrix.
SHAPES = [(770, 130), (3072, 768), (1, 1), (17, 3), (64, 770), (14336, 64), (40_000, 9), (4096, 4097)]
"""Inner and outputs: multiples of what the kernels take at a time, remainders, more inputs than registers hold."""


def is_ours(rows: int) -> bool:
    """Whether a product of so many rows goes to our kernels; torch's widens the weights and rounds its sums."""
    from optigpu.ops.launch import MATRIX_UNITS

    known = torch.cuda.get_device_capability()
    return known >= MATRIX_UNITS or (known >= INT8_CAPABILITY and rows <= ROWS_WITHOUT_MATRIX_UNITS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 64, 130])
@pytest.mark.parametrize(("inner", "outputs"), SHAPES)
def test_products_are_close_to_float64(inner: int, outputs: int, rows: int, dtype: str) -> None:
    """Tensor cores truncate what they add, so their sums may be off by twice a rounding."""
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


@pytest.mark.gpu_first
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_no_product_of_ours_widens_the_weights(rows: int) -> None:
    q, scale = quantize_rows(torch.randn(8192, 4096, device="cuda"))
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    int8_linear(x, q, scale)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    int8_linear(x, q, scale)
    torch.cuda.synchronize()
    assert (torch.cuda.max_memory_allocated() - before < q.numel() / 8) == is_ours(rows)


@pytest.mark.gpu_first
def test_a_recorded_product_gives_what_a_plain_one_does() -> None:
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
    q, scale = quantize_rows(torch.randn(768, 768, device="cuda"))
    x = torch.randn(1, 768, device="cuda")

    def step() -> Any:
        return int8_linear(torch.relu(x), q, scale)

    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(), step())
    names = calls_of(compiled)
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


# ---- int4_weight_only: torch's own operator for bfloat16, plain torch for all else.
SCHEMES = [Int4Scheme(group_size=size, symmetric=kind) for size in (32, 64, 128) for kind in (True, False)]


def expected_backend(dtype: str) -> str:
    fits = dtype == "bfloat16" and torch.cuda.get_device_capability() >= INT4_CAPABILITY
    return "torch-int4pack" if fits else "torch-dequantize"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_are_those_of_the_dequantized_weights(scheme: Int4Scheme, dtype: str) -> None:
    kind = getattr(torch, dtype)
    torch.manual_seed(0)
    for rows, inner, outputs in ((1, 128, 1), (1, 256, 2304), (3, 640, 37), (16, 128, 96), (130, 384, 520)):
        weights = quantize_groups(torch.randn(outputs, inner, device="cuda"), scheme)
        backend = int4_linear_backend("cuda", kind)
        assert backend == expected_backend(dtype)
        x = torch.randn(2, rows, inner, device="cuda").to(kind)
        bias = torch.randn(outputs, device="cuda")
        y = int4_linear(x, pack_int4(weights, backend), bias)
        weight = dequantize_groups(weights).double()
        exact = x.double() @ weight.T + bias.double()
        size = x.double().abs() @ weight.abs().T + bias.double().abs()
        # Products of float32 run in tf32 only if a caller asks for it, which does not happen here.
        assert y.dtype == kind
        assert bool(((y.double() - exact).abs() <= size * 4 * torch.finfo(kind).eps).all())


@pytest.mark.parametrize(
    ("half", "dtype"),
    [(None, "float32"), (Bf16(), "bfloat16"), (Fp16(), "float16")],
    ids=["fp32", "bf16", "fp16"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_decodes_as_its_weights_do(family: str, half: Technique | None, dtype: str) -> None:
    others = [half] if half else []
    reference = in_float64(rounded(on_cuda(f"path:{family}", *others).model.float()))
    runtime = on_cuda(f"path:{family}", Int4WeightOnly(), *others)
    assert runtime.notes.facts["int4_backend"] == expected_backend(dtype)
    assert_right(runtime, reference, dtype, prompt().cuda())


def rounded(model: Any) -> Any:
    """The model with linear weights that 4 bits can hold; the embedding of a tied head stays."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.clone())
    with torch.no_grad():
        for place in linear_places(model):
            weight = weight_of(place.layer)
            weight.copy_(dequantize_groups(quantize_groups(weight, Int4Scheme())))
    return model


# ---- TF32, 8-bit floats, int8 activations, and the hybrid of bits.
ROWS_AND_SHAPES = [(1, 64, 48), (1, 1, 1), (3, 17, 5), (17, 96, 33), (40, 131, 50257 % 100)]
"""Rows, inner, outputs: multiples of what the operators take, and remainders."""


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "outputs"), ROWS_AND_SHAPES)
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
@pytest.mark.parametrize(("rows", "inner", "outputs"), ROWS_AND_SHAPES)
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


@pytest.mark.gpu_first
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


# ---- llm_int8, nf4 and the layers of ready GPTQ and AWQ checkpoints.


OTHERS = [(None, "float32"), (Bf16(), "bfloat16"), (Fp16(), "float16")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("other", "dtype"), OTHERS, ids=["alone", "bf16", "fp16"])
@pytest.mark.parametrize("double", [True, False])
def test_nf4_decodes_as_its_weights_and_rounding_allow(
    family: str, other: Technique | None, dtype: str, double: bool
) -> None:
    others = [other] if other else []
    runtime = on_cuda(f"path:{family}", Nf4(double_quantization=double), *others)
    assert runtime.notes.facts["nf4_fused_layers"] == 0
    reference = in_float64(on_cuda(f"path:{family}", *others).model)
    for layer, quantized in twins(reference, runtime.model):
        weight_of(layer).copy_(dequantized(quantized.cpu()))
        quantized.cuda()
    assert_right(runtime, reference, dtype, prompt().cuda())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("other", "dtype"), OTHERS, ids=["alone", "bf16", "fp16"])
@pytest.mark.parametrize("threshold", [6.0, 0.0])
def test_int8_decodes_as_its_weights_and_rounding_allow(
    family: str, other: Technique | None, dtype: str, threshold: float
) -> None:
    others = [other] if other else []
    reference = in_float64(on_cuda(f"path:{family}", *others).model)
    for layer in replaced_in(reference):
        weight_of(layer).copy_(rounded_to_int8(weight_of(layer)))
    runtime = on_cuda(f"path:{family}", LlmInt8(threshold=threshold), *others)

    def bound(tokens: Any) -> float:
        products = rounding_bound(
            reference, tokens, "float16"
        )  # the library's int8 products come out in float16
        return max(products, rounding_bound(reference, tokens, dtype)) + activation_bound(
            reference, tokens, threshold
        )

    assert_right_within(runtime, reference, bound, prompt().cuda())


@pytest.mark.parametrize(
    ("technique", "layout"), [(Gptq(), Layout()), (Awq(), Layout("awq"))], ids=["gptq", "awq"]
)
@pytest.mark.parametrize(("other", "dtype"), OTHERS, ids=["alone", "bf16", "fp16"])
def test_a_packed_checkpoint_decodes_as_its_weights_and_rounding_allow(
    technique: Technique, layout: Layout, other: Technique | None, dtype: str, models_dir: Path
) -> None:
    name = f"packed/cuda-{technique.name}-{dtype}"
    reference = write_packed_tiny(models_dir / name, "llama", layout).cuda()
    runtime = on_cuda(f"path:{name}", technique, *([other] if other else []))
    assert_right(runtime, reference, dtype, prompt().cuda())
