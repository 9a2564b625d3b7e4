"""train_step by a measuring process, a job, the self-test; what trains something else is outside of the band."""

import math
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

from optigpu.backends.training import TrainingParts
from optigpu.child.messages import Audited, Metered, Ready, Round, RunAudit, RunMeter, RunRound
from optigpu.documents.facts import LossQuality
from optigpu.documents.result import VerdictReason
from optigpu.documents.selftest import SelfCheck, Subject
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec, resolve
from optigpu.measure import run
from optigpu.meters.base import MeterContext, QualityOptions, Reading
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.selftest.checks import case_of, run_technique
from optigpu.selftest.setting import Setting
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import TRAINING, Notes, Phase, Technique
from optigpu.techniques.training.gradient_accumulation import GradientAccumulation
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.vocabulary import DeviceKind, Layer, ReplicateError, SpecError, Task
from optigpu.workloads.train_step import TrainStep
from tests.breadth import cases, spread
from tests.engine.measuring import in_process
from tests.engine.sessions import QUICK, quick_job
from tests.engine.test_replicate import answer, ask, assignment
from tests.engine.training import GPT2, LLAMA, RESNET, trained

pytestmark = pytest.mark.usefixtures("forked_children")

SHAPES = {"kind": "train_step", "batch_size": 2, "sequence_tokens": 16, "shortest_tokens": 4}
OF_TEXT, OF_IMAGES = {"trained_tokens_per_s", "padded_tokens_per_s"}, {"images_per_s"}
ENDS = [(LLAMA, OF_TEXT), (RESNET, OF_IMAGES)]


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.slow
@pytest.mark.parametrize(("model", "own"), ENDS)
def test_a_process_prepares_times_checks_and_weighs_steps(model: str, own: set[str]) -> None:
    with in_process() as child:
        child.tell(assignment(SHAPES, model))
        ready = answer(child)
        assert isinstance(ready, Ready), ready
        assert ready.problem is None
        assert ready.facts.reasons["footprint"].startswith("A training step")
        assert float(str(ready.facts.recorded["gradient_norm"])) > 0
        assert (ready.facts.autograd, ready.facts.dtype) == ("grad", "float32")
        heard = ask(child, RunRound(seconds=0, min_requests=3))
        assert isinstance(heard, Round)
        assert set(heard.samples) == {*TrainStep.metrics, *own}
        parts = [heard.samples[name] for name in ("data_s", "forward_s", "backward_s", "optimizer_s")]
        for whole, *pieces in zip(heard.samples["step_s"], *parts, strict=True):
            assert whole == pytest.approx(sum(pieces))
        audited = ask(child, RunAudit(requests=2, seed=7, repeat=True))
        assert isinstance(audited, Audited)
        assert audited.problem is None
        metered = ask(child, RunMeter(meter="memory"))
        assert isinstance(metered, Metered)
        assert metered.values["params_trainable"] == metered.values["params_total"]
        assert metered.values["peak_bytes"] >= 4 * metered.values["weight_bytes"]
        assert set(metered.reasons) == {"peak_reserved_bytes", "quantized_share"}


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stack": [{"name": "kv_cache"}]}, "kv_cache has no effect on train_step"),
        ({"workload": {"kind": "generate"}, "stack": [{"name": "mixed_precision"}]}, "applies to train_step"),
        ({"backend": "llama_cpp"}, "llama_cpp does not run the workload train_step"),
        ({"workload": {"kind": "train_step", "optimizer": "lion"}}, "adamw"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        JobSpec(**({"workload": {"kind": "train_step"}, "model": LLAMA} | fields))


def check_of(name: str, folder: Path) -> float:
    """The error that the self-test finds for a technique's first trial."""
    case = case_of(TECHNIQUES[name].trials[0])
    check = SelfCheck(subject=Subject.TECHNIQUE, name=name, case=case, device=DeviceKind.CPU)
    return run_technique(check, Setting(probe(), DeviceKind.CPU, 1, folder)).error


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.slow
def test_the_self_test_finds_a_technique_that_does_nothing_or_learns_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "gradient_accumulation"
    assert check_of(name, tmp_path) < 1e-5
    monkeypatch.setattr(TECHNIQUES[name], "training", halved)
    assert check_of(name, tmp_path) == pytest.approx(0.5, rel=0.01)
    monkeypatch.setattr(TECHNIQUES[name], "training", never_updating)
    assert check_of(name, tmp_path) > 2 * MixedPrecision.error_bound
    monkeypatch.setattr(TECHNIQUES[name], "training", Technique.training)
    with pytest.raises(ReplicateError, match="changed nothing"):
        check_of(name, tmp_path)


def never_updating(_technique: Any, parts: Any, _model: Any, notes: Any) -> Any:
    notes.record(wrong=True)
    return parts.but(optimizer=partial(torch.optim.SGD, lr=0.0))


def halved(_technique: Any, parts: Any, _model: Any, notes: Any) -> Any:
    notes.record(wrong=True)
    return parts.but(loss=lambda rows: parts.loss(rows) / 2)


QUALITY_SHAPES: dict[str, Any] = {"batch_size": 8, "sequence_tokens": 32}
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1.0}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 1e-3}
MOST_HONEST = 0.25
"""A quarter of the band: what computes the same but for rounding is far from its edge."""


class Wrong(Technique):
    """Trains something else."""

    layer: ClassVar[Layer] = Layer.TRAINING
    phase: ClassVar[Phase] = Phase.TRAINING
    tasks: ClassVar[tuple[Task, ...]] = TRAINING
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
    workload = TrainStep(**QUALITY_SHAPES, **rule)
    runtime = trained(GPT2, *stack, **QUALITY_SHAPES, **rule)
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
def test_a_job_compares_losses_and_counts_operations_from_random_weights(tmp_path: Path) -> None:
    spec = quick_job(
        workload={"kind": "train_step"} | QUALITY_SHAPES | ADAMW,
        model=GPT2,
        stack=[{"name": "gradient_checkpointing"}],
        measure=QUICK | {"meters": ["latency", "quality"], "quality": {"steps": 20, "seeds": 2}},
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
