"""Models that are changed: smoothing moves outliers and no output, recipes make smaller models that learn."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.conductor.tasks import make_smaller
from optigpu.recipes.make import (
    blocks_of,
    down_layers,
    inner_size,
    kept_neurons,
    learn,
    make,
    mean_divergence,
    narrower,
    perplexity,
    shallower,
)
from optigpu.recipes.request import ABOUT, RecipeOutcome, RecipeRequest, check_output
from optigpu.surgery.places import weight_of
from optigpu.surgery.smoothing import smooth
from optigpu.techniques.base import Notes
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_hybrid import Int8Hybrid
from optigpu.techniques.sparsity.smaller_model import SmallerModel
from optigpu.vocabulary import RecipeName, SpecError, UnsupportedError
from tests.engine.tiny_models import FAMILIES, ignore, prompt, runtime_of, tiny_model

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread", "forked_children")

EVERY = pytest.mark.parametrize("family", FAMILIES)
BOTH = pytest.mark.parametrize("recipe", list(RecipeName))


def logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=rows, use_cache=False).logits
    return found


def request(folder: Path, **changes: Any) -> RecipeRequest:
    small = {"texts": 8, "length": 12, "steps": 4, "batch_size": 4, "model": "path:gpt2"}
    return RecipeRequest.model_validate(
        {"recipe": "distillation", "output": folder / "out"} | small | changes
    )


@EVERY
def test_with_all_its_blocks_the_student_is_its_teacher(family: str) -> None:
    teacher = tiny_model(family)
    assert logits(shallower(teacher, range(2)), prompt()).equal(logits(teacher, prompt()))
    student = shallower(teacher, [1])
    assert len(blocks_of(student)) == student.config.num_hidden_layers == 1
    mine, its = blocks_of(student)[0].state_dict(), blocks_of(teacher)[1].state_dict()
    assert all(weight.equal(its[name]) for name, weight in mine.items())


@EVERY
def test_a_narrower_model_computes_what_the_kept_neurons_do(family: str) -> None:
    """A neuron without a way out of the MLP adds nothing: taking it away changes rounding alone."""
    teacher = tiny_model(family)
    kept = [torch.arange(0, inner_size(teacher), 2) for _ in blocks_of(teacher)]
    for layer in down_layers(teacher):
        with torch.no_grad():
            weight_of(layer)[:, 1::2] = 0
    student = narrower(teacher, kept)
    assert inner_size(student) == len(kept[0])
    assert logits(student, prompt()) == pytest.approx(logits(teacher, prompt()), abs=1e-3)


@EVERY
def test_neurons_that_do_nothing_go_first(family: str) -> None:
    teacher = tiny_model(family).requires_grad_(False)
    for layer in down_layers(teacher):
        weight_of(layer)[:, 1::2] = 0
    for kept in kept_neurons(teacher, prompt(4, 12), 0.5):
        assert len(kept) == inner_size(teacher) // 2
        assert int((kept % 2).sum()) <= len(kept) // 10, "a few others never fire (ReLU), and do as little"


def test_a_student_learns_what_its_teacher_says() -> None:
    teacher = tiny_model("gpt2").requires_grad_(False)
    student, texts = shallower(teacher, [0]), prompt(16, 12)
    before = mean_divergence(student, teacher, texts)
    losses = learn(student, teacher, texts, steps=40, batch_size=8, learning_rate=3e-3, doing=ignore)
    assert len(losses) == 40
    assert mean_divergence(student, teacher, texts) < 0.7 * before
    assert mean_divergence(teacher, teacher, texts) == pytest.approx(0, abs=1e-6)
    assert perplexity(teacher, texts) > 1


@pytest.mark.slow
@BOTH
def test_the_outcome_is_a_folder_that_stands_in_its_teacher_s_place(
    models_dir: Path, recipe: RecipeName
) -> None:
    outcome = make(request(models_dir, recipe=recipe, output=models_dir / recipe, texts=32, steps=20), ignore)
    folder = outcome.request.output
    assert RecipeOutcome.model_validate_json((folder / ABOUT).read_text()) == outcome
    assert outcome.parameters < outcome.teacher_parameters
    assert outcome.kld < outcome.kld_before
    assert [each.name for each in models_dir.iterdir() if each.name.startswith(".")] == []
    smaller = runtime_of("path:gpt2", SmallerModel(model=f"path:{recipe}"))
    assert smaller.weights == outcome.parameters
    assert smaller.logits(prompt()).equal(runtime_of(f"path:{recipe}").logits(prompt()))
    again = make(request(models_dir, recipe=recipe, output=folder, steps=0), ignore)
    assert (again.first_loss, again.kld) == (None, again.kld_before), "its own outcome may be replaced"


def test_what_cannot_be_asked_is_refused_with_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name a trained model, for example bundled:tiny"):
        request(tmp_path, model="preset:gpt2")
    with pytest.raises(UnsupportedError, match="do not fit the model's context of 64"):
        make(request(tmp_path, length=65), ignore)
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="is a file"):
        check_output(tmp_path / "file")
    with pytest.raises(SpecError, match="make it first"):
        check_output(tmp_path / "nowhere" / "out")
    with pytest.raises(SpecError, match="no recipe wrote"):
        check_output(tmp_path)


@pytest.mark.slow
def test_the_process_tells_what_it_does_and_why_it_cannot(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(UnsupportedError, match="a student of 9 is no smaller"):
        make_smaller(request(tmp_path, layers=9), said.append, lambda: None, limit_s=300)
    assert said[0] == "loading the teacher"
    assert not (tmp_path / "out").exists()


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
