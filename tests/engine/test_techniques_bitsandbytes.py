"""llm_int8 and nf4: what they replace, what it weighs to the byte, and how far it computes from what it was."""

from typing import Any

import pytest

from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.layouts import NF4_BLOCK, NF4_PACKED_INPUTS, NF4_PACKED_OUTPUTS
from optigpu.surgery.bitsandbytes_layers import (
    Nf4Linear,
)
from optigpu.surgery.places import linear_places, weight_of
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.quantization.llm_int8 import LlmInt8
from optigpu.techniques.quantization.nf4 import Nf4
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from tests.engine.bitsandbytes_weights import (
    activation_bound,
    dequantized,
    replaced_in,
    rounded_to_int8,
    twins,
)
from tests.engine.decoded import assert_right, assert_right_within
from tests.engine.pairs import pairwise
from tests.engine.rounding import (
    UNIT,
    in_float64,
    rounding_bound,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
BOTH: list[Technique] = [LlmInt8(), Nf4()]
OTHERS = [(None, "float32"), (Bf16(), "bfloat16"), (Fp16(), "float16")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("technique", BOTH, ids=["llm_int8", "nf4"])
def test_it_replaces_every_linear_layer_but_the_head(family: str, technique: Technique) -> None:
    plain = runtime_of(f"path:{family}").model
    layers = replaced_in(plain)

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", technique)
        head = runtime.model.get_output_embeddings()
        assert [place.layer for place in linear_places(runtime.model)] == [head]
        assert head.weight.equal(plain.get_output_embeddings().weight)
        assert runtime.notes.facts[f"{technique.name.removeprefix('llm_')}_layers"] == len(layers)

    assert_needs_hook(technique, "modules", claim)


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_counts_a_byte_a_weight_and_a_scale_for_each_output(family: str) -> None:
    plain = runtime_of(f"path:{family}").model
    weights = [weight_of(layer) for layer in replaced_in(plain)]
    gone = sum(4 * weight.numel() for weight in weights)
    come = sum(weight.numel() + 4 * weight.shape[0] for weight in weights)
    assert weight_bytes(runtime_of(f"path:{family}", LlmInt8()).model) == weight_bytes(plain) - gone + come


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("double", [True, False])
def test_nf4_counts_half_a_byte_a_weight_and_its_statistics(family: str, double: bool) -> None:
    plain = runtime_of(f"path:{family}").model
    come = 0
    for layer in replaced_in(plain):
        blocks = -(-layer.weight.numel() // NF4_BLOCK)
        nested = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4  # their own statistics, levels and mean
        come += layer.weight.numel() // 2 + 4 * 16 + (nested if double else 4 * blocks)
    gone = sum(4 * layer.weight.numel() for layer in replaced_in(plain))
    runtime = runtime_of(f"path:{family}", Nf4(double_quantization=double))
    assert weight_bytes(runtime.model) == weight_bytes(plain) - gone + come
    assert runtime.notes.facts["nf4_fused_layers"] == 0
    assert runtime.notes.facts["nf4_double_quantized_layers"] == double * runtime.notes.facts["nf4_layers"]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_nf4_is_the_same_weights_with_statistics_in_bfloat16(family: str) -> None:
    """Where this CPU has the instructions for it; elsewhere nothing is packed."""
    import torch

    plain = runtime_of(f"path:{family}", Bf16())
    bound = 3 * UNIT["bfloat16"]  # of the statistic, of the level, and of their product
    expected = sum(fits_fused(layer) for layer in replaced_in(plain.model))
    for packing in (True, False):
        runtime = runtime_of(f"path:{family}", Nf4(packing=packing), Bf16())
        assert runtime.notes.facts["nf4_fused_layers"] == packing * expected
        for was, layer in twins(plain.model, runtime.model):
            weight = weight_of(was)
            assert layer.fused == (packing and fits_fused(was))
            kept = dequantized(Nf4Linear(weight, None, False, False))
            unit = torch.eye(weight.shape[1], dtype=torch.bfloat16)
            used = layer(unit).double() - (0 if layer.bias is None else layer.bias.double())
            if layer.fused:
                assert sum(buffer.nbytes for buffer in layer.buffers()) == (
                    weight.numel() // 2 + 2 * (weight.numel() // NF4_BLOCK) + 4 * 16 + bias_bytes(layer)
                )
                slack = 2 * UNIT["bfloat16"] * float(used.abs().max() + bias_size(layer))
                assert bool(((used.T - kept).abs() <= bound * kept.abs() + slack).all())


@pytest.mark.parametrize(("family", "beside", "double"), pairwise([*FAMILIES], OTHERS, [True, False]))
def test_nf4_decodes_as_its_weights_and_rounding_allow(
    family: str, beside: tuple[Technique | None, str], double: bool
) -> None:
    other, dtype = beside
    others = [other] if other else []
    runtime = runtime_of(f"path:{family}", Nf4(double_quantization=double, packing=False), *others)
    reference = in_float64(runtime_of(f"path:{family}", *others).model)
    for layer, quantized in twins(reference, runtime.model):
        weight_of(layer).copy_(dequantized(quantized))
    assert_right(runtime, reference, dtype)


def test_packed_nf4_decodes_as_its_weights_and_rounding_allow() -> None:
    runtime = runtime_of("path:llama", Nf4(), Bf16())
    reference = in_float64(runtime_of("path:llama", Bf16()).model)
    for layer, quantized in twins(reference, runtime.model):
        plain = Nf4Linear(weight_of(layer).bfloat16(), None, not quantized.fused, False)
        weight_of(layer).copy_(dequantized(plain))
    assert_right(runtime, reference, "bfloat16")


@pytest.mark.parametrize(("family", "beside", "threshold"), pairwise([*FAMILIES], OTHERS, [6.0, 0.0]))
def test_int8_decodes_as_its_weights_and_rounding_allow(
    family: str, beside: tuple[Technique | None, str], threshold: float
) -> None:
    other, dtype = beside
    others = [other] if other else []
    reference = in_float64(runtime_of(f"path:{family}", *others).model)
    for layer in replaced_in(reference):
        weight_of(layer).copy_(rounded_to_int8(weight_of(layer)))
    runtime = runtime_of(f"path:{family}", LlmInt8(threshold=threshold), *others)
    assert_right_within(
        runtime,
        reference,
        lambda tokens: (
            rounding_bound(reference, tokens, dtype) + activation_bound(reference, tokens, threshold)
        ),
    )


@pytest.mark.slow
@pytest.mark.parametrize("technique", BOTH, ids=["llm_int8", "nf4"])
def test_it_is_part_of_one_compiled_graph(technique: Technique) -> None:
    """Outliers are an operator's own affair, so that even they leave the graph whole."""
    plain = runtime_of("path:llama", technique).generate(prompt(), 4).tokens
    compiled = runtime_of("path:llama", technique, TorchCompile(backend="aot_eager"))
    assert compiled.generate(prompt(), 4).tokens.equal(plain)
    assert compiled.notes.facts["compiled_graphs"] == 1


@pytest.mark.parametrize("technique", BOTH, ids=["llm_int8", "nf4"])
def test_it_says_what_is_missing(technique: Technique) -> None:
    environment = probe()
    assert technique.check(environment, DeviceKind.CPU, None) is None
    without = {name: version for name, version in environment.software.items() if name != "bitsandbytes"}
    reason = technique.check(environment.model_copy(update={"software": without}), DeviceKind.CPU, None)
    assert reason is not None
    assert "pip install -e '.[quant]'" in reason


@pytest.mark.parametrize("technique", BOTH, ids=["llm_int8", "nf4"])
def test_it_refuses_what_it_cannot_quantize_and_leaves_it(technique: Technique) -> None:
    import torch

    for family, spoil, match in [
        ("llama", lambda model: model.lm_head.weight.fill_(float("nan")), "NaN or infinite"),
        ("gpt2", lambda model: Int8WeightOnly().modules(model, Notes()), "quantized already"),
    ]:
        model = runtime_of(f"path:{family}").model
        spoil(model)
        before = [type(module) for module in model.modules()]
        with pytest.raises(UnsupportedError, match=match):
            technique.modules(model, Notes())
        assert [type(module) for module in model.modules()] == before
    head: Any = torch.nn.Sequential(torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(UnsupportedError, match="leaves the head as it is"):
        technique.modules(head, Notes())


def test_int8_refuses_weights_beyond_float16_and_leaves_the_model() -> None:
    model = runtime_of("path:opt").model
    model.model.decoder.layers[1].fc2.weight[3, 5] = 1e5
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match=r"layers\.1\.fc2 has weights beyond"):
        LlmInt8().modules(model, Notes())
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("technique", BOTH, ids=["llm_int8", "nf4"])
def test_what_it_cannot_be_combined_with_is_said_before(technique: Technique) -> None:
    for name, reason in {**technique.conflicts, "int8_weight_only": "weights are quantized once"}.items():
        with pytest.raises(SpecError, match=reason):
            resolve((technique, TECHNIQUES[name](name=name)), "generate")


def fits_fused(layer: Any) -> bool:
    from bitsandbytes.functional import has_avx512bf16

    outputs, inputs = weight_of(layer).shape
    return bool(has_avx512bf16()) and outputs % NF4_PACKED_OUTPUTS == 0 and inputs % NF4_PACKED_INPUTS == 0


def bias_bytes(layer: Any) -> int:
    return 0 if layer.bias is None else int(layer.bias.nbytes)


def bias_size(layer: Any) -> float:
    return 0.0 if layer.bias is None else float(layer.bias.abs().max())
