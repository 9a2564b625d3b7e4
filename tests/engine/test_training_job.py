"""train_step as a measuring process runs it, through the whole of a job, and in the self-test."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.child.messages import Audited, Metered, Ready, Round, RunAudit, RunMeter, RunRound
from optigpu.documents.selftest import SelfCheck, Subject
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.selftest.setting import Setting
from optigpu.selftest.techniques import case_of, run_technique
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.vocabulary import DeviceKind, ReplicateError, SpecError
from optigpu.workloads.train_step import TrainStep
from tests.engine.in_process import in_process
from tests.engine.test_replicate import answer, ask, assignment
from tests.engine.training import LLAMA, RESNET, VIT

pytestmark = pytest.mark.usefixtures("one_torch_thread", "forked_children")
SHAPES = {"kind": "train_step", "batch_size": 2, "sequence_tokens": 16, "shortest_tokens": 4}
OF_TEXT, OF_IMAGES = {"trained_tokens_per_s", "padded_tokens_per_s"}, {"images_per_s"}
ENDS = [(LLAMA, OF_TEXT), (RESNET, OF_IMAGES)]


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


@pytest.mark.slow
def test_a_job_says_which_metrics_its_kind_of_model_does_not_have(tmp_path: Path) -> None:
    measure = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency"]}
    spec = JobSpec(workload=SHAPES, model=RESNET, measure=measure, limits={"wait_for_quiet_s": 0})
    (result,) = run(spec, lambda _: None, lock_dir=tmp_path).results
    assert all((result.metrics[name].value or 0) > 0 for name in {*TrainStep.metrics, *OF_IMAGES})
    for name in OF_TEXT:
        assert result.metrics[name].value is None
        assert result.metrics[name].reason == "an image classifier has no tokens"


@pytest.mark.parametrize("model", [LLAMA, VIT, "bundled:tiny", "preset:gpt2", "preset:resnet-50"])
def test_either_kind_of_model_can_be_trained(model: str) -> None:
    assert JobSpec(workload={"kind": "train_step"}, model=model).model == model


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stack": [{"name": "kv_cache"}]}, "kv_cache has no effect on train_step"),
        ({"workload": {"kind": "generate"}, "stack": [{"name": "mixed_precision"}]}, "applies to train_step"),
        ({"backend": "llama_cpp"}, "llama_cpp does not run the workload train_step"),
        ({"backend": "litert"}, "litert does not run the workload train_step"),
        ({"workload": {"kind": "train_step", "sequence_tokens": 1024}}, "sequence_tokens"),
        ({"model": "preset:vit-base", "workload": {"kind": "train_step", "image_size": 64}}, "224"),
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
