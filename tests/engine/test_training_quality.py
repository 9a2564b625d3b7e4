"""Loss equivalence on a small model: what trains the same stays inside of the band, and what does not is outside."""

import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from optigpu.backends.training import TrainingParts
from optigpu.documents.facts import LossQuality
from optigpu.documents.result import VerdictReason
from optigpu.job.spec import JobSpec, resolve
from optigpu.measure import run
from optigpu.meters.base import MeterContext, QualityOptions, Reading
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.techniques.base import IN_TRAINING, Notes, Phase, Technique
from optigpu.techniques.training.gradient_accumulation import GradientAccumulation
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.vocabulary import Layer, Task
from optigpu.workloads.train_step import TrainStep
from tests.breadth import cases, spread
from tests.engine.training import GPT2, trained

pytestmark = pytest.mark.usefixtures("forked_children")

SHAPES: dict[str, Any] = {"batch_size": 8, "sequence_tokens": 32}
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-3}
MOST_HONEST = 0.25
"""A quarter of the band: what computes the same but for rounding is far from its edge."""


class Wrong(Technique):
    """Trains something else."""

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.TRAINING
    tasks: ClassVar[tuple[Task, ...]] = IN_TRAINING
    name: Literal["wrong"] = "wrong"
    how: Literal["gradients", "learning rate", "samples", "nan"]

    def training(self, parts: TrainingParts, model: Any, notes: Notes) -> TrainingParts:
        match self.how:
            case "gradients":
                for weight in model.parameters():
                    weight.register_hook(lambda gradient: 0.7 * gradient)
                return parts
            case "learning rate":
                return parts.but(optimizer=lambda weights: _faster(parts.optimizer(weights)))
            case "samples":
                return parts.but(arrange=lambda batch: parts.arrange(batch.split(2)[0]))
            case "nan":
                return parts.but(loss=lambda rows: math.nan * parts.loss(rows))


def _faster(optimizer: Any) -> Any:
    for group in optimizer.param_groups:
        group["lr"] *= 3
    return optimizer


def context(folder: Path, *stack: Technique, **rule: Any) -> MeterContext:
    workload = TrainStep(**SHAPES, **rule)
    runtime = trained(GPT2, *stack, **SHAPES, **rule)
    return MeterContext(
        runtime=runtime,
        request=workload.prepare(runtime),
        workload=workload,
        model=GPT2,
        folder=folder,
        seed=0,
        quality=QualityOptions(steps=20),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The references of both optimizers."""
    made = {}
    for rule in (ADAMW, SGD):
        folder = tmp_path_factory.mktemp(rule["optimizer"])
        assert make_reference(context(folder, **rule)).reasons == {}
        made[rule["optimizer"]] = folder
    return made


def measured(folders: dict[str, Path], rule: dict[str, Any], *stack: Technique) -> Reading:
    return QualityMeter().read(context(folders[rule["optimizer"]], *stack, **rule))


@pytest.mark.slow
@pytest.mark.parametrize(
    "stack",
    spread([((),), ((MixedPrecision(),),), ((GradientAccumulation(micro_batches=4),),)], by_default=1),
    ids=str,
)
def test_what_trains_the_same_stays_inside(folders: dict[str, Path], stack: tuple[Technique, ...]) -> None:
    reading = measured(folders, ADAMW, *resolve(stack, "train_step"))
    assert reading.values["loss_deviation"] < MOST_HONEST
    assert reading.values["loss_final"] < 6.2, "less than the logarithm of 512 tokens"
    assert reading.values["gradient_norm"] > 0
    assert set(reading.values) | set(reading.reasons) == set(QualityMeter.metrics)
    assert "by its losses" in reading.reasons["kld_mean"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "rule"), cases([("gradients", SGD), ("learning rate", ADAMW), ("samples", ADAMW)], 1)
)
def test_what_trains_something_else_is_outside(
    folders: dict[str, Path], how: Any, rule: dict[str, Any]
) -> None:
    assert measured(folders, rule, Wrong(how=how)).values["loss_deviation"] > 1


@pytest.mark.slow
def test_a_loss_that_is_nan_is_told_with_its_step(folders: dict[str, Path]) -> None:
    reading = measured(folders, SGD, Wrong(how="nan"))
    assert reading.reasons["loss_deviation"] == "The loss of step 1 is not finite."
    assert isinstance(reading.facts.quality, LossQuality)
    assert reading.facts.quality.not_finite_step == 1


@pytest.mark.slow
def test_the_first_weights_are_where_every_comparison_begins(folders: dict[str, Path]) -> None:
    subject = context(folders["sgd"], **SGD)
    subject.request.run()
    first, again = (QualityMeter().read(subject) for _ in range(2))
    assert first.values == again.values
    assert isinstance(first.facts.quality, LossQuality)
    assert first.facts.quality.losses == pytest.approx(first.facts.quality.fp32_losses, abs=1e-5)


@pytest.mark.slow
def test_other_shapes_are_another_reference(folders: dict[str, Path], tmp_path: Path) -> None:
    assert "another workload" in measured({"adamw": folders["sgd"]}, ADAMW).reasons["loss_deviation"]
    nowhere = {"adamw": tmp_path}
    assert "no fp32 reference" in measured(nowhere, ADAMW).reasons["loss_deviation"]


@pytest.mark.slow
def test_a_job_compares_losses_and_counts_operations_from_random_weights(tmp_path: Path) -> None:
    spec = JobSpec(
        workload={"kind": "train_step"} | SHAPES | ADAMW,
        model=GPT2,
        stack=[{"name": "gradient_checkpointing"}],
        measure={
            "replicates": 1,
            "min_seconds": 0.01,
            "max_seconds": 1,
            "meters": ["latency", "quality"],
            "quality": {"steps": 20, "seeds": 2},
        },
        limits={"wait_for_quiet_s": 0},
    )
    (result,) = run(spec, lambda _: None, lock_dir=tmp_path).results
    values = {name: summary.value for name, summary in result.metrics.items()}
    assert values["loss_deviation"] is not None
    assert values["loss_deviation"] < MOST_HONEST
    assert VerdictReason.LOSS_DIVERGED not in result.verdict.reasons
    assert result.facts.training is not None
    assert result.facts.training.hardware_flops > 1.1 * result.facts.training.model_flops > 0
    assert result.provenance is not None
    assert "samples that were made from the seed" in result.provenance.reasons["dataset_hash"]
    assert set(values) >= {"mfu", "hfu"}
