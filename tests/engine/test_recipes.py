"""Recipes: which weights a smaller model keeps, that it learns from its teacher, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.conductor.recipe import make_smaller
from optigpu.job.plan import variants_of
from optigpu.recipes.making.make import kept_count, kept_neurons, make
from optigpu.recipes.making.students import (
    blocks_of,
    down_layers,
    inner_size,
    kept_blocks,
    learn,
    mean_divergence,
    narrower,
    perplexity,
    shallower,
)
from optigpu.recipes.request import ABOUT, RecipeOutcome, RecipeRequest, check_output, comparison_of
from optigpu.report.tables import recipe_grid
from optigpu.surgery.places import weight_of
from optigpu.techniques.sparsity.smaller_model import SmallerModel
from optigpu.vocabulary import DeviceKind, OptiGPUError, RecipeName, SpecError, UnsupportedError
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


@pytest.mark.parametrize(
    ("blocks", "layers", "kept"),
    [
        (4, None, (0, 3)),
        (12, 6, (0, 2, 4, 7, 9, 11)),
        (4, 3, (0, 2, 3)),
        (2, 1, (0,)),
        (6, 5, (0, 1, 2, 4, 5)),
    ],
)
def test_a_student_keeps_evenly_spaced_blocks(blocks: int, layers: int | None, kept: tuple[int, ...]) -> None:
    assert kept_blocks(blocks, layers) == kept


@pytest.mark.parametrize(("blocks", "layers"), [(4, 4), (4, 9), (1, None)])
def test_a_student_that_is_no_smaller_is_refused(blocks: int, layers: int | None) -> None:
    with pytest.raises(UnsupportedError, match="ask for fewer layers"):
        kept_blocks(blocks, layers)


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


@pytest.mark.parametrize(("keep", "words"), [(0.01, "raise keep to 0.0833"), (0.99, "lower keep to 0.917")])
def test_a_share_that_is_not_possible_is_refused_with_one_that_is(keep: float, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        kept_count(96, keep)


def test_what_is_not_known_of_a_family_is_said() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(
        "gpt_neo", num_layers=1, attention_types=[[["global"], 1]], hidden_size=16
    )
    config.num_heads = 2
    with pytest.raises(UnsupportedError, match="gpt_neo"):
        inner_size(AutoModelForCausalLM.from_config(config))


def test_a_student_learns_what_its_teacher_says() -> None:
    teacher = tiny_model("gpt2").requires_grad_(False)
    student, texts = shallower(teacher, [0]), prompt(16, 12)
    before = mean_divergence(student, teacher, texts)
    losses = learn(student, teacher, texts, steps=40, batch_size=8, learning_rate=3e-3, doing=ignore)
    assert len(losses) == 40
    assert mean_divergence(student, teacher, texts) < 0.7 * before
    assert mean_divergence(teacher, teacher, texts) == pytest.approx(0, abs=1e-6)
    assert perplexity(teacher, texts) > 1


def test_a_loss_that_is_not_finite_ends_it() -> None:
    teacher = tiny_model("gpt2").requires_grad_(False)
    student = shallower(teacher, [0])
    with torch.no_grad():
        next(student.parameters()).fill_(float("nan"))
    with pytest.raises(OptiGPUError, match="loss of step 1 is nan; ask for a lower learning_rate"):
        learn(student, teacher, prompt(), steps=2, batch_size=2, learning_rate=1e-3, doing=ignore)


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


def test_the_job_compares_both_side_by_side(tmp_path: Path) -> None:
    outcome = RecipeOutcome(
        request=request(tmp_path, model="bundled:tiny"),
        changed="layers 0 of 2 are kept",
        teacher_parameters=200,
        parameters=100,
        teacher_perplexity=30,
        perplexity_before=90,
        perplexity=40,
        kld_before=1.0,
        kld=0.3,
        first_loss=1.0,
        last_loss=0.2,
        seconds=60,
    )
    spec = comparison_of(outcome, DeviceKind.CPU, 2)
    baseline, smaller = variants_of(spec)
    assert (baseline.stack, smaller.stack) == ((), (SmallerModel(model="path:out"),))
    assert baseline.workload_digest == smaller.workload_digest
    assert {"quality", "latency"} <= set(spec.measure.meters)
    grid = recipe_grid(outcome)
    assert [row[0] for row in grid.rows] == ["bundled:tiny", "smaller, untrained", "smaller, trained"]
    assert "path:out" in grid.notes[-1]


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


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """/proc takes no folder, not even the superuser's."""
    said: list[str] = []
    with pytest.raises(
        SpecError, match=r"^output: /proc cannot be written \(.+\); name a folder of yours\.$"
    ):
        make_smaller(
            request(tmp_path, output=Path("/proc/smaller")),
            said.append,
            lambda: None,
            limit_s=300,
            program=("/bin/false",),
            lock_dir=tmp_path / "locks",
        )
    assert said == []
    assert not (tmp_path / "locks").exists()


@pytest.mark.slow
def test_the_process_tells_what_it_does_and_why_it_cannot(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(UnsupportedError, match="a student of 9 is no smaller"):
        make_smaller(
            request(tmp_path, layers=9), said.append, lambda: None, limit_s=300, lock_dir=tmp_path / "locks"
        )
    assert said[0] == "loading the teacher"
    assert not (tmp_path / "out").exists()
