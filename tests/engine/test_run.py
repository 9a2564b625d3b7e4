"""run(): the conductor against measuring processes that behave well and badly, and once against the real one."""

import fcntl
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load import Load, beside
from optigpu.child.connection import HIGHEST
from optigpu.conductor.processes.rounds import FIRST_ROUNDS
from optigpu.conductor.session import environment_for
from optigpu.documents.events import (
    Estimated,
    Event,
    Finished,
    Planned,
    Printed,
    Progressed,
    RoughlyMeasured,
    VariantFinished,
    VariantStarted,
    Waiting,
)
from optigpu.documents.facts import WarmUpFacts
from optigpu.documents.result import Outcome, VerdictReason, VerdictWarning
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, Subject
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.selftest import kept
from optigpu.statistics.within import FEWEST_REQUESTS
from optigpu.vocabulary import DeviceKind, LeaseLostError, VariantStatus
from tests.engine.processes import is_alive, may_come_first, program, wait_until
from tests.engine.sessions import AT_ONCE, FAST, small_job

pytestmark = pytest.mark.slow

job = partial(small_job, plan="ladder")


class Conductor:
    """Runs jobs with one of the children and keeps what it heard."""

    def __init__(self, lock_dir: Path) -> None:
        self.lock_dir = lock_dir
        self.events: list[Event] = []

    def run(self, spec: JobSpec, child: str, *arguments: object, **options: Any) -> Report:
        return run(
            spec, self.events.append, lock_dir=self.lock_dir, program=program(child, *arguments), **options
        )

    @property
    def outcomes(self) -> list[Outcome]:
        return [event.outcome for event in self.events if isinstance(event, VariantFinished)]

    @property
    def progress(self) -> list[Progressed]:
        return [event for event in self.events if isinstance(event, Progressed)]


@pytest.fixture
def conductor(tmp_path: Path) -> Conductor:
    return Conductor(tmp_path / "locks")


def test_a_ladder_from_the_plan_to_the_attribution(conductor: Conductor) -> None:
    report = conductor.run(job("bf16", "static_kv_cache", measure={"replicates": 3}), "well_behaved")
    kinds = [event.kind for event in conductor.events if event.kind not in ("progressed", "printed", "rough")]
    assert kinds == ["planned", "estimated", *["variant_started"] * 4, *["variant_finished"] * 4, "finished"]
    rough = {
        event.index: event.rough.ratio for event in conductor.events if isinstance(event, RoughlyMeasured)
    }
    assert rough == {0: None, 1: pytest.approx(2.0), 2: pytest.approx(2.0), 3: pytest.approx(3.0)}
    printed = Counter(event.index for event in conductor.events if isinstance(event, Printed))
    assert printed == {0: 3, 1: 3, 2: 3, 3: 3}, "each process prints a line"
    assert [result.variant.label for result in report.results] == [
        "baseline",
        "bf16",
        "static_kv_cache",
        "bf16 + static_kv_cache",
    ]
    speedups = [row.speedup.ratio if row.speedup else None for row in report.attribution.rows]
    assert speedups == [None, *(pytest.approx(ratio, rel=0.01) for ratio in (2, 2, 3))]
    assert report.attribution.best == 3
    assert conductor.events[-1] == Finished(attribution=report.attribution)


def test_a_result_holds_what_its_processes_reported(conductor: Conductor) -> None:
    (result,) = conductor.run(job("bf16", plan="single", measure={"replicates": 2}), "well_behaved").results
    (outcome,) = conductor.outcomes
    tokens = result.metrics["tokens_per_s"]
    assert tokens.value == pytest.approx(20.005)
    assert tokens.n == sum(len(process) for process in outcome.counted("tokens_per_s"))
    assert tokens.replicates == 2
    assert tokens.ci is not None
    assert tokens.ci[0] < 20.005 < tokens.ci[1]
    assert result.metrics["load_s"].value == 0.5
    assert result.metrics["compile_s"].value == 1.5
    assert result.metrics["weight_bytes"].value == 4e6
    assert (result.metrics["peak_bytes"].value, result.metrics["peak_bytes"].reason) == (None, "no GPU")
    assert outcome.samples["weight_bytes"] == ((4e6,), (4e6,))
    assert result.facts.warmup == (WarmUpFacts(requests=3, steady=True),) * 2
    assert result.verdict.valid
    assert set(result.verdict.warnings) <= {VerdictWarning.SHARED_HOST}, "others may be busy on this machine"
    assert result.variant.variant_digest
    assert result.environment.hardware_class


def test_a_variable_that_may_change_what_is_measured_is_passed_on_and_recorded(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = {"NVIDIA_TF32_OVERRIDE": "0", "CUDA_LAUNCH_BLOCKING": "1", "LD_LIBRARY_PATH": "/opt/blas"}
    for name, value in (changing | {"HF_TOKEN": "hf_secret", "CUDA_VISIBLE_DEVICES": ""}).items():
        monkeypatch.setenv(name, value)
    (result,) = conductor.run(job(plan="single"), "well_behaved").results
    inherited = result.facts.recorded["variables"]
    assert isinstance(inherited, dict)
    assert {name: inherited.get(name) for name in changing} == changing
    assert changing.items() <= result.environment.variables.items()
    assert not {"HF_TOKEN", "CUDA_VISIBLE_DEVICES", "PATH", "HOME"} & set(result.environment.variables)
    assert "hf_secret" not in result.model_dump_json(), "a preset needs no token"


def test_what_fails_ends_its_variant_alone(conductor: Conductor) -> None:
    stack = ("bf16", "no_kv_cache", "eager_attention")
    report = conductor.run(job(*stack, plan="grid"), "moody")
    ends = {outcome.index: (outcome.status.value, outcome.reason) for outcome in report.outcomes}
    assert ends[0] == ("succeeded", None)
    assert ends[1] == ("unsupported", "no bf16 here")
    assert ends[2] == ("failed", "out of memory: 8 GB were asked for")
    assert ends[3] == ("succeeded", None)
    assert len(ends) == 8
    assert [row.reason for row in report.attribution.rows][1] == "no bf16 here"
    (outcome,) = conductor.run(job("fp16", plan="single"), "moody").outcomes
    assert (outcome.status, outcome.reason) == (VariantStatus.FAILED, "a layer is missing")


def test_a_wrong_output_is_measured_and_never_ranked(conductor: Conductor) -> None:
    report = conductor.run(job("eager_attention"), "moody")
    invalid = report.results[1]
    assert invalid.verdict.reasons == (VerdictReason.OUTPUT_INVALID,)
    assert "3 of 8 tokens." in invalid.verdict.notes
    assert report.attribution.best == 0
    speedup = report.attribution.rows[1].speedup
    assert speedup is not None
    assert speedup.reasons == (VerdictReason.OUTPUT_INVALID,)
    assert "3 of 8 tokens" in (report.attribution.rows[1].reason or "")


def test_sampling_goes_on_until_the_median_is_known_or_the_time_is_over(conductor: Conductor) -> None:
    (result,) = conductor.run(job(plan="single"), "erratic", 0.001).results
    assert VerdictWarning.NOT_CONVERGED in result.verdict.warnings
    assert result.metrics["tokens_per_s"].n > FEWEST_REQUESTS, "more rounds than the first"
    (steady,) = conductor.run(job(plan="single"), "well_behaved").results
    assert steady.metrics["tokens_per_s"].n == 20 * FIRST_ROUNDS, "known after the first rounds"


def test_a_dead_replicate_leaves_no_result_that_looks_whole(conductor: Conductor) -> None:
    spec = job(plan="single", measure={"replicates": 3})
    report = conductor.run(spec, "dying", "SIGUSR1", 1, "-")
    assert report.results == ()
    assert report.outcomes[0].status is VariantStatus.FAILED
    assert f"signal {signal.SIGUSR1:d}" in (report.outcomes[0].reason or "")
    starts = {event.replicate for event in conductor.progress if event.doing == "starting"}
    assert starts == {0, 1}, "and no third one"
    assert conductor.progress[-1].fraction == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("empty", "for every request; this one had"),
        ("zero", "tokens_per_s of a request is 0"),
    ],
)
def test_a_round_without_all_its_numbers_is_refused(conductor: Conductor, kind: str, words: str) -> None:
    (outcome,) = conductor.run(job(plan="single"), "garbage", kind).outcomes
    assert outcome.status is VariantStatus.FAILED
    assert words in (outcome.reason or "")


def test_the_deadline_ends_the_rest_and_keeps_what_was_measured(conductor: Conductor) -> None:
    asked: list[None] = []
    spec = job("bf16", "static_kv_cache", limits=AT_ONCE | {"timeout_s": 5})
    report = conductor.run(spec, "hanging", cancelled=lambda: asked.append(None))
    assert [outcome.status.value for outcome in report.outcomes] == ["succeeded", *["failed"] * 3], report
    assert all("raise limits.timeout_s" in (outcome.reason or "") for outcome in report.outcomes[1:])
    assert len(report.results) == 1
    assert len(asked) > 5, "asked at least once a second while the process is silent"


def test_cancelling_ends_a_silent_process(
    conductor: Conductor, started: Callable[[], frozenset[int]]
) -> None:
    def cancelled() -> str | None:
        return "changed my mind" if any(event.doing == "hanging" for event in conductor.progress) else None

    report = conductor.run(job("bf16"), "hanging", cancelled=cancelled)
    assert report.cancelled
    assert [outcome.status for outcome in conductor.outcomes] == [VariantStatus.CANCELLED] * 2
    assert all((outcome.reason or "").startswith("changed my mind") for outcome in conductor.outcomes)
    assert not started()


def test_what_the_listener_raises_passes_and_ends_the_process(tmp_path: Path) -> None:
    def listener(event: Event) -> None:
        if isinstance(event, Progressed) and event.doing == "deaf":
            raise LeaseLostError("another worker has it")

    with pytest.raises(LeaseLostError):
        run(job(), listener, lock_dir=tmp_path, program=program("deaf", tmp_path / "pid"))
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_variants_side_by_side_take_turns_and_are_compared_in_pairs(conductor: Conductor) -> None:
    report = conductor.run(job("bf16", measure={"replicates": 2}), "drifting")
    turns = [event.index for event in conductor.progress if event.doing == "measuring"]
    assert turns[:4] == [0, 1, 1, 0]
    assert all(result.facts.side_by_side == (0, 1) for result in report.results)
    gain = report.attribution.rows[1].speedup
    assert gain is not None
    assert gain.ci is not None
    assert gain.ci[1] / gain.ci[0] < 1.01, (
        "the machine doubled its speed between the replicates, for both alike"
    )
    baseline = report.results[0].metrics["tokens_per_s"]
    assert baseline.ci is not None
    assert baseline.ci[1] / max(baseline.ci[0], 1e-9) > 2, "which either of them alone cannot know"
    assert report.attribution.baseline_again is None


def test_without_room_the_baseline_is_measured_again_at_the_end(
    conductor: Conductor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optigpu.conductor.processes.residents.MOST_RESIDENT", 1)
    report = conductor.run(job("bf16"), "well_behaved")
    assert [outcome.status for outcome in report.outcomes] == [VariantStatus.SUCCEEDED] * 2
    assert [result.facts.side_by_side for result in report.results] == [(0,), (1,)]
    again = report.attribution.baseline_again
    assert again is not None
    assert again.ratio == pytest.approx(1, rel=0.01)
    starts = [event.index for event in conductor.progress if event.doing == "starting"]
    # What takes long is said again.
    assert [index for index, _ in groupby(starts)] == [0, 1, 0]


def test_variants_that_are_done_are_left_alone_and_attributed(conductor: Conductor) -> None:
    spec = job("bf16", "static_kv_cache")
    first = conductor.run(spec, "well_behaved")
    done = {0: first.outcomes[0], 2: Outcome(index=2, status=VariantStatus.FAILED, reason="it broke")}
    conductor.events.clear()
    report = conductor.run(spec, "well_behaved", done=done)
    assert [event.index for event in conductor.events if isinstance(event, VariantStarted)] == [1, 3]
    assert [outcome.index for outcome in conductor.outcomes] == [1, 3]
    planned = conductor.events[0]
    assert isinstance(planned, Planned)
    assert len(planned.variants) == 4
    assert [outcome.index for outcome in report.outcomes] == [0, 1, 2, 3]
    assert report.outcomes[0] == first.outcomes[0]
    assert [result.variant.index for result in report.results] == [0, 1, 3]
    rows = report.attribution.rows
    assert [(row.index, row.status.value) for row in rows] == [
        *((0, "succeeded"), (1, "succeeded"), (2, "failed"), (3, "succeeded")),
    ]
    assert rows[2].reason == "it broke"
    assert rows[1].speedup is not None, "against the baseline of the attempt before"
    assert rows[1].speedup.compared_with == 0
    assert conductor.events[-1] == Finished(attribution=report.attribution)


def test_the_device_is_waited_for_visibly_and_can_be_given_up(conductor: Conductor) -> None:
    with somebody_measuring(conductor.lock_dir):
        report = conductor.run(
            job(), "well_behaved", cancelled=lambda: "enough" if conductor.progress else None
        )
    assert (report.cancelled, report.results) == (True, ())
    assert [event.doing for event in conductor.progress] == ["waiting for the device"]
    assert conductor.run(job(plan="single"), "well_behaved").results


def test_a_technique_that_failed_its_self_test_is_unsupported_and_the_others_go_on(
    conductor: Conductor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path))
    check = SelfCheck(subject=Subject.TECHNIQUE, name="bf16", device=DeviceKind.CPU)
    failed = CheckResult(check=check, status=CheckStatus.FAILED, reason="It is wrong.")
    here = environment_for(DeviceKind.CPU)
    path = kept.keep(kept.outcome_of(here, DeviceKind.CPU, (failed,)), here)
    conductor.run(job("bf16", "static_kv_cache"), "well_behaved")
    statuses = {outcome.index: str(outcome.status) for outcome in conductor.outcomes}
    assert statuses == {0: "succeeded", 1: "unsupported", 2: "succeeded", 3: "unsupported"}
    reasons = {outcome.reason for outcome in conductor.outcomes if outcome.reason}
    (reason,) = reasons
    assert reason.startswith("bf16 failed its self-test here: It is wrong. ")
    path.write_text("half a fi")
    (outcome,) = conductor.run(job("bf16", plan="single"), "well_behaved").outcomes
    assert str(outcome.status) == "succeeded"


def test_an_interrupt_reaches_the_conductor_alone_and_leaves_nothing(tmp_path: Path) -> None:
    conductor = start_conductor(tmp_path, "interrupted", tmp_path)
    wait_until((tmp_path / "pid").exists)
    os.killpg(conductor.pid, signal.SIGINT)
    conductor.wait(60)
    assert conductor.returncode != 0
    assert not is_alive(int((tmp_path / "pid").read_text()))
    assert not (tmp_path / "interrupted").exists()


def test_killing_the_conductor_ends_its_process(tmp_path: Path) -> None:
    conductor = start_conductor(tmp_path, "interrupted", tmp_path)
    wait_until((tmp_path / "pid").exists)
    conductor.kill()
    conductor.wait(60)
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not is_alive(child))


def test_the_device_stays_locked_until_the_last_process_is_gone(tmp_path: Path) -> None:
    conductor = start_conductor(tmp_path, "deaf", tmp_path / "pid")
    wait_until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
    child = int((tmp_path / "pid").read_text())
    conductor.kill()
    conductor.wait(60)
    assert is_alive(child)
    assert is_locked(tmp_path / "locks" / "cpu.lock")
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not is_locked(tmp_path / "locks" / "cpu.lock"))


def test_the_real_measuring_process(tmp_path: Path) -> None:
    document = {"workload": {"kind": "matmul", "sizes": [64, 128]}, "measure": FAST, "limits": AT_ONCE}
    report = run(JobSpec.model_validate(document), lambda _: None, lock_dir=tmp_path)
    assert [result.variant.label for result in report.results] == ["float32 64", "float32 128"]
    for result in report.results:
        tflops = result.metrics["tflops"]
        assert tflops.value is not None
        assert tflops.value > 0
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        assert result.facts.nice == (HIGHEST if may_come_first() else usual)
    assert report.attribution.best is None


def start_conductor(folder: Path, child: str, *arguments: object) -> "subprocess.Popen[bytes]":
    command = program("conductor", folder, child, *arguments)
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


@contextmanager
def somebody_measuring(lock_dir: Path) -> Iterator[None]:
    lock_dir.mkdir()
    with (lock_dir / "cpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_locked(path: Path) -> bool:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_a_job_waits_for_a_process_that_works_and_then_goes_on(tmp_path: Path) -> None:
    conductor = Conductor(tmp_path / "locks")
    with beside(Load(1.0), seed=0):
        report = conductor.run(job(plan="single", limits={"wait_for_quiet_s": 1}), "well_behaved", threads=2)
    (waiting,) = (event for event in conductor.events if isinstance(event, Waiting))
    assert waiting.doing.endswith("; waiting up to 1 s for quiet")
    kinds = [event.kind for event in conductor.events if event.kind != "progressed"]
    before = kinds[: kinds.index("waiting")]
    assert list(dict.fromkeys(before)) == ["planned", "estimated", "variant_started", "rough"]
    (result,) = report.results
    assert result.environment.variables["OMP_WAIT_POLICY"] == "passive"
    foreseen, beside_others = (event for event in conductor.events if isinstance(event, Estimated))
    assert "; beside that it takes about " in beside_others.sentence
    assert beside_others.seconds > foreseen.seconds
