"""Sessions with one of the children as measuring process, and jobs that are brief."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.conductor.processes.room import MakeMemoryRule
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.session import Session
from optigpu.documents.events import Event
from optigpu.documents.result import Environment, Result, VerdictReason
from optigpu.hardware.probe import probe
from optigpu.job.estimate import plan_time
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.vocabulary import DeviceKind
from tests.engine.processes import program

PLENTY = 100


class Space:
    """A memory rule for one turn: space for `processes` processes."""

    def __init__(self, processes: int) -> None:
        self._left = processes

    def add(self, pid: int) -> None:
        """One less."""
        self._left -= 1

    def has_space(self) -> bool:
        """Whether one is left."""
        return self._left > 0


def space_for(turns: Iterable[int]) -> MakeMemoryRule:
    """In each turn space for so many processes, in the turns after that for all."""
    left = iter(turns)

    def rule(device: DeviceKind, environment: Environment) -> Space:
        return Space(next(left, PLENTY))

    return rule


def session_with(
    spec: JobSpec,
    folder: Path,
    child: str,
    *arguments: object,
    space: Iterable[int] = (),
) -> tuple[Session, list[Event]]:
    """A session whose processes are `child`, and the list of the events that it will tell."""
    events: list[Event] = []
    indexes = [variant.index for variant in variants_of(spec)]
    session = Session(
        spec=spec,
        environment=probe(),
        threads=1,
        program=program(child, *arguments),
        descriptors=(),
        folder=str(folder),
        progress=JobProgress(
            events.append,
            lambda: None,
            indexes,
            spec.measure.replicates,
            guesses=plan_time(spec, variants_of(spec)).guesses,
            measure=spec.measure,
        ),
        on_event=events.append,
        memory_rule=space_for(space),
    )
    return session, events


AT_ONCE = {"wait_for_quiet_s": 0}
FAST: dict[str, Any] = {
    "replicates": 1,
    "min_seconds": 0.01,
    "max_seconds": 1,
    "meters": ["latency", "memory"],
}
"""How little a job measures whose processes are one of the children."""


def small_job(*stack: str, **changes: Any) -> JobSpec:
    """Of random weights that generate; `changes` are fields of the job, those of `measure` beside FAST."""
    document = {"workload": {"kind": "generate"}, "model": "preset:tiny-llama-test", "plan": "grid"}
    fields = {"stack": [{"name": name} for name in stack], "limits": AT_ONCE} | changes
    return JobSpec.model_validate(document | fields | {"measure": FAST | changes.get("measure", {})})


BRIEF: dict[str, Any] = {
    "measure": {"replicates": 1, "min_seconds": 0.05, "max_seconds": 0.5, "meters": ["latency"]},
    "limits": AT_ONCE,
}
"""The fields of such a job."""


@pytest.fixture(scope="session")
def own_lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A lock of their own for jobs that are started without one, so that no other program's job is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_LOCK_DIR", str(tmp_path_factory.mktemp("locks")))
        yield


QUICK: dict[str, Any] = {
    "replicates": 1,
    "min_seconds": 0.01,
    "max_seconds": 1,
    "meters": ["latency", "memory", "quality"],
    "quality": {"tokens": 200},
}
"""How little a job measures whose figures are not looked at."""
GENERATE = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 16}


def quick_job(**changes: Any) -> JobSpec:
    """Of a trained model that generates; `changes` are fields of the job."""
    document = {"workload": GENERATE, "model": "bundled:tiny", "measure": QUICK}
    return JobSpec.model_validate(document | {"limits": AT_ONCE} | changes)


def brief_job(**changes: Any) -> JobSpec:
    """The same, of which nothing but the time is measured."""
    return quick_job(measure=QUICK | {"meters": ["latency"]}, **changes)


def measured(spec: JobSpec, lock_dir: Path) -> Report:
    """With one thread: beside other tests, two that wait for each other take many times as long."""
    return run(spec, lambda _: None, lock_dir=lock_dir, threads=1)


def value(result: Result, metric: str) -> float:
    """Of a metric that has one."""
    found = result.metrics[metric].value
    assert found is not None, result.metrics[metric].reason
    return found


def by_label(report: Report) -> dict[str, Result]:
    """The results, of which none failed."""
    assert {outcome.reason for outcome in report.outcomes} == {None}
    return {result.variant.label: result for result in report.results}


def assert_measured(result: Result) -> None:
    """Of the model itself, with time and memory."""
    wrong = {VerdictReason.OUTPUT_INVALID, VerdictReason.NOT_THE_MODEL}
    assert wrong.isdisjoint(result.verdict.reasons)
    assert value(result, "tokens_per_s") > 0
    assert value(result, "host_peak_bytes") > 0
