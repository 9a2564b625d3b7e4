"""Experts that transformers holds as tensors of three dimensions are quantized as linear layers are."""

from typing import Any

import pytest
import torch

from optigpu import quantize
from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.models.loading.footprint import weight_bytes
from optigpu.surgery.places import RoutedExperts, checked_places, exchange, expert_places, opened
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Notes
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.mixtures import MIXTURES, mixture
from tests.engine.tiny_models import ignore, prompt

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FLOAT_ERROR = 1e-5
"""Of the largest logit: what another order of float32 sums changes."""


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(prompt(), use_cache=False).logits
    return logits


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert float((found - wanted).abs().max()) <= FLOAT_ERROR * float(wanted.abs().max())


@pytest.mark.parametrize("family", MIXTURES)
def test_opened_experts_compute_what_transformers_does(family: str) -> None:
    model = mixture(family)
    wanted, held = logits_of(model), weight_bytes(model)
    exchange(expert_places(model), lambda layer: layer)
    assert not [name for name, weight in model.named_parameters() if weight.dim() > 2 and "conv" not in name]
    assert_close(logits_of(model), wanted)
    assert weight_bytes(model) == held, "the layers are views"


@pytest.mark.parametrize("technique", [Int8WeightOnly(), Int4WeightOnly()], ids=lambda each: each.name)
@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_computes_with_its_dequantized_weights(family: str, technique: Any) -> None:
    model, reference = mixture(family), mixture(family)
    experts = expert_places(reference)
    technique.modules(model, Notes())

    for place in checked_places(reference, "the reference"):
        quantized: Any = model.get_submodule(place.path)
        weight = place.layer.weight
        wide = quantized.widened(torch.float32)
        steps = 253 if technique.name == "int8_weight_only" else 7
        assert float((wide - weight).abs().max()) <= float(weight.abs().max()) / steps
        weight.copy_(wide)  # within transformers' own tensor
    assert experts
    assert any(weight.dim() > 2 for weight in reference.parameters()), (
        "the reference has transformers' modules"
    )
    assert_close(logits_of(model), logits_of(reference))


@pytest.mark.parametrize(
    "name", ["int8_weight_only", "int4_weight_only", "int8_dynamic", "int8_hybrid", "nf4", "llm_int8"]
)
def test_every_technique_says_what_share_it_covered(name: str) -> None:
    model = mixture("mixtral")
    sizes = {path: weight.numel() for path, weight in model.named_parameters()}
    left = ["norm", "mlp.gate.weight"]  # the router
    left += [] if name == "int8_hybrid" else ["embed_tokens"]
    left += ["lm_head"] if name in ("nf4", "llm_int8") else []
    floats = sum(size for path, size in sizes.items() if any(part in path for part in left))
    stack = resolve((TECHNIQUES[name](name=name),), "generate")
    applied = DecodingModel(model, stack, DeviceKind.CPU, seed=0, progress=ignore)
    assert applied.quantized == pytest.approx(1 - floats / sum(sizes.values()), abs=1e-9)
    assert applied.generate(prompt(), 3).tokens.shape == (2, 3)


def test_quantize_takes_a_mixture_to_its_target() -> None:
    model = mixture("mixtral")
    before = weight_bytes(model)
    technique, notes = TECHNIQUES["int8_hybrid"](name="int8_hybrid"), Notes()
    technique.modules(model, notes)
    share = weight_bytes(model) / before
    assert share < 0.28
    assert notes.facts["hybrid_share"] == pytest.approx(share, abs=1e-3)
    assert weight_bytes(quantize(mixture("mixtral"))) == weight_bytes(model)


def test_a_damaged_expert_is_refused_before_anything_is_changed() -> None:
    model = mixture("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj[2, 0, 0] = float("nan")
    with pytest.raises(UnsupportedError, match=r"experts\.down_proj\.2 has weights that are NaN"):
        Int8WeightOnly().modules(model, Notes())
    assert model.model.layers[0].mlp.experts is experts


def test_experts_are_one_graph_where_every_expert_computes_every_token() -> None:
    experts = opened(mixture("mixtral").model.layers[0].mlp.experts)
    assert isinstance(experts, RoutedExperts)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([[0, 1], [2, 3], [3, 0], [1, 2], [0, 2]])
    weights = torch.linspace(0.1, 1, 10).reshape(5, 2)
    compiled = torch.compile(experts, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_close(compiled(x, indices, weights), experts(x, indices, weights))
