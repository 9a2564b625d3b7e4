"""fp8 computes what 8-bit floats allow, here by torch's operator for CPUs; tf32 sets what float32 products run in."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optigpu.documents.result import Accelerator
from optigpu.hardware import probe
from optigpu.models.loading.footprint import weight_bytes
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp8 import Fp8
from optigpu.techniques.quantization.fp8.layers import (
    E4M3_LARGEST,
    FP8_SIZE_MULTIPLE,
    Fp8Linear,
    quantize_fp8,
)
from optigpu.techniques.quantization.tf32 import Tf32
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.rounding import (
    assert_greedy_as_far_as_it_can_be_told,
    in_float64,
    logits_of,
    rounding_bound,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
SHAPES = [(1, 64, 48), (1, 1, 1), (3, 17, 5), (5, 96, 33), (20, 130, 16), (33, 31, 100)]
"""Rows, inner, outputs: multiples of what the operator takes on CUDA, and remainders."""


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """float64 rounded to 4 bits of exponent and 3 of mantissa, written apart from the code that is tested."""
    exponent = x.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3)
    return (x / step).round() * step


def rounded(x: torch.Tensor) -> torch.Tensor:
    """float64 [..., inner] as e4m3 numbers times one float32 scale for each row."""
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = (largest.float() / 448).double().masked_fill(largest == 0, 1)
    return e4m3(x / scale) * scale


def test_rows_are_rounded_to_the_nearest_8_bit_float() -> None:
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 100)
    x[2] = 0
    q, scale = quantize_fp8(x)
    assert (q.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale[2] == 1
    quotient = (x / scale[:, None]).double()
    assert torch.equal(q.double(), e4m3(quotient))
    assert q.double().abs().amax(dim=1).tolist() == [
        E4M3_LARGEST,
        E4M3_LARGEST,
        0,
        E4M3_LARGEST,
        E4M3_LARGEST,
        E4M3_LARGEST,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inner", "outputs"), SHAPES)
def test_a_layer_agrees_with_float64(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> None:
    """Within the rounding of a float32 sum over `inner`, and of the type of the result."""
    generator = torch.Generator().manual_seed(inner)
    weight, bias = (
        torch.randn(outputs, inner, generator=generator),
        torch.randn(outputs, generator=generator),
    )
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    layer = Fp8Linear(weight, bias)
    y = layer(x)
    (q, q_scale), (w, w_scale) = quantize_fp8(x), quantize_fp8(weight)
    scales = q_scale.double()[:, None] * w_scale.double()
    exact = (q.double() @ w.double().T) * scales + bias.double()
    size = (q.double().abs() @ w.double().abs().T) * scales + bias.double().abs()
    allowed = size * (inner + 4) * 2**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    assert torch.all((y.double() - exact).abs() <= allowed)
    assert layer(x.view(1, rows, inner)).equal(y.view(1, rows, outputs))
    assert layer(x[:0]).shape == (0, outputs)


def test_nan_and_infinity_are_not_hidden() -> None:
    layer = Fp8Linear(torch.randn(4, 20), None)
    x = torch.randn(3, 20)
    x[0, 3], x[1, 2] = torch.nan, torch.inf
    y = layer(x)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert y[2].isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_takes_a_quarter_of_the_bytes_of_every_linear_layer(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    places = linear_places(plain)
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    gone = sum(4 * place.layer.weight.numel() for place in places)
    kept = 4 * plain.get_input_embeddings().weight.numel() if tied else 0
    scales = sum(4 * len(weight_of(place.layer)) + 4 for place in places)

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Fp8())
        stored = [b for b in runtime.model.buffers() if b.dtype is torch.float8_e4m3fn]
        assert len(stored) == runtime.notes.facts.get("fp8_layers") == len(places)
        assert 4 * sum(b.nbytes for b in stored) == gone  # the tiny models' sizes are multiples of STEP
        assert weight_bytes(runtime.model) == weight_bytes(plain) - gone + kept + gone // 4 + scales

    assert_needs_hook(Fp8(), "modules", claim)


def test_sizes_are_filled_up_for_cuda() -> None:
    layer = Fp8Linear(torch.randn(FP8_SIZE_MULTIPLE + 1, 3), None)
    assert layer.q.shape == (2 * FP8_SIZE_MULTIPLE, FP8_SIZE_MULTIPLE)
    assert not layer.q[FP8_SIZE_MULTIPLE + 1 :].float().any()
    assert not layer.q[:, 3:].float().any()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_decodes_as_quantization_and_rounding_allow(family: str) -> None:
    reference = rounding_to_8_bits(in_float64(runtime_of(f"path:{family}").model))
    runtime = runtime_of(f"path:{family}", Fp8())
    tokens = runtime.generate(prompt(), 6).tokens
    sequence = torch.cat([prompt(), tokens[:, :-1]], dim=1)
    bound = rounding_bound(reference, sequence, "float32")
    exact = logits_of(reference, sequence)
    assert float((runtime.logits(sequence) - exact).abs().max()) <= bound
    assert_greedy_as_far_as_it_can_be_told(reference, prompt(), tokens, bound)


def test_fp8_goes_together_with_bf16_and_in_one_graph() -> None:
    model = runtime_of("path:gpt2", Bf16(), Fp8()).model
    layer = model.transformer.h[0].mlp.c_fc
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert layer(x).dtype is torch.bfloat16
        torch.testing.assert_close(compiled(x), layer(x))


def rounding_to_8_bits(model: Any) -> Any:
    """A float64 model whose linear layers round weights and activations to e4m3."""

    class Rounding(torch.nn.Module):
        def __init__(self, plain: Any) -> None:
            super().__init__()
            self.weight, self.bias = rounded(weight_of(plain).detach()), plain.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(rounded(x), self.weight, self.bias)

    for place in linear_places(model):
        place.put(Rounding(place.layer))
    return model


def test_fp8_refuses_what_it_cannot_quantize_and_leaves_it() -> None:
    damaged, twice = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        damaged.lm_head.weight[3, 5] = torch.inf
    Fp8().modules(twice, Notes())
    for model, sentence in [
        (damaged, "lm_head has weights that are NaN or infinite"),
        (twice, "quantized already"),
    ]:
        before = [type(module) for module in model.modules()]
        with pytest.raises(UnsupportedError, match=sentence):
            Fp8().modules(model, Notes())
        assert [type(module) for module in model.modules()] == before


@pytest.fixture
def restored() -> Iterator[None]:
    cudnn = torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.usefixtures("restored")
def test_tf32_sets_what_products_run_in_and_leaves_the_weights() -> None:
    plain = dict(runtime_of("path:gpt2").model.named_parameters())

    def claim() -> None:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        runtime = runtime_of("path:gpt2", Tf32())
        assert (
            torch.get_float32_matmul_precision()
            == runtime.notes.facts.get("float32_matmul_precision")
            == "high"
        )
        assert torch.backends.cudnn.allow_tf32
        # Both ways to ask: TorchInductor and libraries use either, and mixed settings make one of them raise.
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert all(parameter.equal(plain[name]) for name, parameter in runtime.model.named_parameters())

    assert_needs_hook(Tf32(), "modules", claim)


@pytest.mark.parametrize(
    ("technique", "capability", "least"),
    [
        (Tf32(), "7.5", "8.0"),
        (Tf32(), "8.0", None),
        (Tf32(), None, None),
        (Fp8(), "8.6", "8.9"),
        (Fp8(), "8.9", None),
        (Fp8(), "10.0", None),
    ],
)
def test_an_older_gpu_is_refused_with_what_it_lacks(
    technique: Technique, capability: str | None, least: str | None
) -> None:
    gpu = Accelerator(name="GPU", memory_bytes=1, uuid="GPU-1", compute_capability=capability)
    environment = probe().model_copy(update={"accelerators": (gpu,)})
    reason = technique.check(environment, DeviceKind.CUDA, None)
    assert (reason is None) == (least is None)
    if reason:
        assert f"need compute capability {least} and GPU has {capability}" in reason
    assert technique.devices == (DeviceKind.CUDA,)
    assert not technique.suits(environment, DeviceKind.CUDA)


def test_a_machine_without_a_gpu_is_told_so() -> None:
    environment = probe().model_copy(update={"accelerators": ()})
    for technique in (Tf32(), Fp8()):
        assert "this machine has none" in str(technique.check(environment, DeviceKind.CUDA, None))
