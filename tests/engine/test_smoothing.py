"""Smoothing: outliers move from activations into weights, and no output changes."""

import copy
from typing import Any

import pytest
import torch

from optigpu.surgery.smoothing import OWN_LENGTH, OWN_ROWS, own_text, smooth
from optigpu.techniques.base import Notes
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.vocabulary import UnsupportedError
from tests.engine.tiny_models import FAMILIES, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_changes_norms_and_no_output(family: str) -> None:
    model = tiny_model(family).requires_grad_(False)
    ids = prompt(2, 16)
    before, norms = model(input_ids=ids).logits, norm_weights(model)
    assert smooth(model, ids) == 4  # two norms in each of two blocks
    assert torch.equal(model(input_ids=ids).logits, before)
    changed = [(new / old).log2() for new, old in zip(norm_weights(model), norms, strict=True)]
    assert all(torch.equal(doublings, doublings.round()) for doublings in changed)
    assert sum(bool(doublings.any()) for doublings in changed) >= 3


def norm_weights(model: Any) -> list[torch.Tensor]:
    return [p.clone() for name, p in model.named_parameters() if p.dim() == 1 and name.endswith("weight")]


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_makes_quantized_activations_with_outliers_better(family: str) -> None:
    model = tiny_model(family).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("weight"):
            parameter[3] *= 100
    ids = prompt(2, 16)
    exact = model(input_ids=ids).logits
    errors = []
    for technique in (Int8Dynamic(), Int8Dynamic(smoothing=0.5)):
        quantized, notes = copy.deepcopy(model), Notes()
        technique.modules(quantized, notes)
        errors.append(float((quantized(input_ids=ids).logits - exact).abs().mean()))
        assert notes.facts.get("smoothed_norms") == (None if technique.smoothing is None else 4)
    assert errors[1] < 0.75 * errors[0]


def test_smoothing_is_a_part_of_the_hybrid() -> None:
    facts = runtime_of("path:gpt2", Int8Hybrid(smoothing=0.5)).notes.facts
    assert facts["smoothed_norms"] == 4


def test_calibration_ids_that_do_not_fit_are_refused_before_anything_is_changed() -> None:
    model = tiny_model("gpt2").requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    ids = prompt(2, 16)
    low, high = ids.clone(), ids.clone()
    low[1, 2], high[1, 2] = -1, 96
    refused: list[tuple[Any, float, str]] = [
        (ids[0], 0.5, r"int64 \[sequences, length\], not torch.int64 \[16\]"),
        (ids.int(), 0.5, "not torch.int32"),
        (ids[:0], 0.5, "not torch.int64"),
        (ids.tolist(), 0.5, "not list"),
        (low, 0.5, "Token id -1 of calibration_ids is out of range"),
        (high, 0.5, "Token id 96 .* this model's ids are 0 to 95"),
        (prompt(1, 65), 0.5, "65 tokens each; this model's context is 64"),
        (ids, 1.5, "alpha must be between 0 and 1, not 1.5"),
    ]
    for wrong, alpha, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            smooth(model, wrong, alpha)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())


def test_a_model_that_adds_what_its_norms_give_cannot_be_smoothed_and_is_left_as_it_was() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = FAMILIES["opt"] | {"do_layer_norm_before": False, "vocab_size": 96, "pad_token_id": 1}
    model = (
        AutoModelForCausalLM.from_config(AutoConfig.for_model("opt", **shape)).eval().requires_grad_(False)
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match="other parts use the outputs of its norms"):
        smooth(model, prompt(2, 16))
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in before.items())
    with pytest.raises(UnsupportedError, match="a linear layer directly after a norm"):
        smooth(runtime_of("path:gpt2", Int8Hybrid()).model, prompt(2, 16))


def test_a_model_writes_its_own_calibration_text() -> None:
    model = tiny_model("qwen2")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    ids = own_text(model)
    assert torch.equal(torch.rand(3), expected)
    assert (ids.dtype, tuple(ids.shape)) == (torch.int64, (OWN_ROWS, min(OWN_LENGTH, 64)))
    assert torch.equal(ids, own_text(model))
    assert len(set(ids.flatten().tolist())) > 10
    vision: Any = torch.nn.Linear(2, 2)
    vision.config = type("Config", (), {})()
    with pytest.raises(UnsupportedError, match="a model that generates its calibration text"):
        own_text(vision)
