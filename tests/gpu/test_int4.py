"""int4_weight_only on an NVIDIA GPU: torch's own operator for bfloat16, plain torch for all else."""

from typing import Any

import pytest

from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int4_linear import (
    OLDEST_CAPABILITY,
    int4_linear,
    int4_linear_backend,
    int4_rows,
    pack_int4,
)
from optigpu.surgery.int4_layers import int4_bytes
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from tests.engine.decoded import NEW_TOKENS, assert_right
from tests.engine.rounding import (
    in_float64,
)
from tests.engine.tiny_models import FAMILIES, prompt
from tests.gpu.cuda_models import on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]
SCHEMES = [Int4Scheme(group_size=size, symmetric=kind) for size in (32, 64, 128) for kind in (True, False)]


def expected_backend(dtype: str) -> str:
    import torch

    fits = dtype == "bfloat16" and torch.cuda.get_device_capability() >= OLDEST_CAPABILITY
    return "torch-int4pack" if fits else "torch-dequantize"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_are_those_of_the_dequantized_weights(scheme: Int4Scheme, dtype: str) -> None:
    import torch

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


def test_rows_can_be_looked_up_on_the_device() -> None:
    import torch

    weights = quantize_groups(torch.randn(40, 64, device="cuda"), Int4Scheme(symmetric=False))
    ids = torch.tensor([[0, 39], [7, 31]], device="cuda")
    found = int4_rows(pack_int4(weights, "torch-dequantize"), ids)
    assert torch.equal(found, dequantize_groups(weights)[ids])


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


@pytest.mark.parametrize("half", [None, Bf16()], ids=["fp32", "bf16"])
def test_a_compiled_step_gives_the_tokens_of_a_plain_one(half: Technique | None) -> None:
    others = [half] if half else []
    prompts = prompt().cuda()
    plain = on_cuda("path:llama", Int4WeightOnly(), *others).generate(prompts, NEW_TOKENS).tokens
    compiled = on_cuda("path:llama", Int4WeightOnly(), TorchCompile(mode="reduce-overhead"), *others)
    assert compiled.generate(prompts, NEW_TOKENS).tokens.equal(plain)


@pytest.mark.parametrize("half", [None, Bf16()], ids=["fp32", "bf16"])
def test_the_packed_weights_are_that_small(half: Technique | None) -> None:
    others = [half] if half else []
    plain = on_cuda("path:llama", *others).model
    weights = [weight_of(place.layer) for place in linear_places(plain)]
    gone = sum(weight.numel() * weight.element_size() for weight in weights)
    packed = sum(int4_bytes(weight, Int4Scheme()) for weight in weights)
    found = weight_bytes(on_cuda("path:llama", Int4WeightOnly(), *others).model)
    assert found == weight_bytes(plain) - gone + packed


def rounded(model: Any) -> Any:
    """The model with linear weights that 4 bits can hold; the embedding of a tied head stays."""
    import torch

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(embedding.weight.clone())
    with torch.no_grad():
        for place in linear_places(model):
            weight = weight_of(place.layer)
            weight.copy_(dequantize_groups(quantize_groups(weight, Int4Scheme())))
    return model
