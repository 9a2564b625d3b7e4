"""Before a job starts it looks at the machine: whom it waits for, how long, and what ends the wait."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from optigpu.conductor import quiet
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.quiet import at_work, wait_for_quiet
from optigpu.conductor.session import Session
from optigpu.conductor.verdicts.host_monitor import SERVICE, HostMonitor, HostReading, HostSample
from optigpu.documents.events import Event, Waiting
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import CancelledError, DeadlineError, DeviceKind
from tests.unit.made_results import ENVIRONMENT

CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA


def sample(foreign_s: float | None, named: Mapping[str, float] | None = None, **seen: Any) -> HostSample:
    """What one look of two seconds saw."""
    usual: dict[str, Any] = {"cpus": 2, "idle_s": None}
    return HostSample(wall_s=2.0, foreign_s=foreign_s, named=named or {}, **usual | seen)


QUIET, BUSY = sample(0.02), sample(2.2, {"cc1plus": 2.1, "sshd": 0.02})


@pytest.mark.parametrize(
    ("device", "seen", "text"),
    [
        (CPU, BUSY, "cc1plus uses 1.1 of 2 cores"),
        (CPU, sample(1.0, {"cc1plus": 0.6, "chrome": 0.4}), "cc1plus and chrome use 0.5 of 2 cores"),
        (CPU, sample(1.0, {"chrome": 0.1}), "Other processes use 0.5 of 2 cores"),  # the others have ended
        (CPU, sample(2.0, {"cc1plus": 2.0}, cpus=1), "cc1plus uses 1.0 of 1 core"),
        (CPU, sample(2.4, {SERVICE: 1.4, "cc1plus": 0.9}), "cc1plus uses 0.5 of 2 cores"),
        (CPU, sample(1.4, {SERVICE: 1.4}), None),
        (CPU, QUIET, None),
        (CPU, sample(0.4, {"chrome": 0.4}), None),  # a steady fifth of a core is dealt with while measuring
        (CPU, sample(0.9, {"chrome": 0.9}, cpus=64), None),
        (CPU, sample(1.1, {"chrome": 1.1}, cpus=64), "chrome uses 0.6 of 64 cores"),
        (CPU, sample(None), None),  # the system does not count
        (CPU, sample(-0.01), None),
        (CUDA, sample(1.1, {"cc1plus": 1.1}, idle_s=1.2), None),
        (CUDA, sample(3.1, {"cc1plus": 3.1}, idle_s=0.8), "cc1plus uses 1.6 of 2 cores"),
        (CUDA, sample(0.0, idle_s=4.0, gpu_foreign=1), "Another process uses the GPU"),
        (CUDA, sample(0.0, idle_s=4.0, gpu_foreign=3), "3 other processes use the GPU"),
    ],
)
def test_who_is_worth_waiting_for(device: DeviceKind, seen: HostSample, text: str | None) -> None:
    assert at_work(device, seen) == text


class ScriptedMonitor(HostMonitor):
    """Looks that see what a test says, the last one again and again; it counts them."""

    def __init__(self, looks: Iterable[HostSample]) -> None:
        super().__init__(CPU, ENVIRONMENT, set)
        self.looks: Iterator[HostSample] = iter(looks)
        self.seen = 0
        self.last = QUIET

    def between(self, before: HostReading, after: HostReading) -> HostSample:
        self.seen += 1
        self.last = next(self.looks, self.last)
        return self.last


class Start:
    """A job that is about to start, and what its listener hears."""

    def __init__(self, wait_s: float, looks: Iterable[HostSample], cancel_after: int = 10**9) -> None:
        self.events: list[Event] = []
        self.monitor = ScriptedMonitor(looks)
        self.cancel_after = cancel_after
        spec = JobSpec.model_validate(
            {"workload": {"kind": "matmul"}, "limits": {"wait_for_quiet_s": wait_s}},
        )
        progress = JobProgress(self.events.append, self._cancelled, [0], 1)
        self.session = Session(spec, ENVIRONMENT, 1, (), (), str(Path()), progress, self.events.append)
        self.session.monitor = self.monitor

    def _cancelled(self) -> str | None:
        return "enough" if self.monitor.seen >= self.cancel_after else None

    @property
    def waits(self) -> list[Waiting]:
        return [event for event in self.events if isinstance(event, Waiting)]


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quiet, "LOOK_S", 0.002)


def test_a_quiet_machine_is_looked_at_once() -> None:
    start = Start(60, [QUIET])
    wait_for_quiet(start.session)
    assert (start.monitor.seen, start.waits) == (1, [])


def test_it_waits_until_the_others_rest_and_says_for_whom_once() -> None:
    start = Start(60, [BUSY, BUSY, sample(0.9, {"chrome": 0.8}), QUIET, BUSY])
    wait_for_quiet(start.session)
    assert start.monitor.seen == 4
    assert start.waits == [
        Waiting(doing="cc1plus uses 1.1 of 2 cores; waiting up to 60 s for quiet", up_to_s=60)
    ]
    shown = [event.doing for event in start.events if event.kind == "progressed"]
    assert any(doing.startswith("chrome uses 0.5 of 2 cores; waiting") for doing in shown)


def test_it_goes_on_when_the_wait_is_over_whoever_is_still_at_work() -> None:
    start = Start(0.01, [BUSY])
    wait_for_quiet(start.session)
    assert len(start.waits) == 1
    assert 1 < start.monitor.seen < 20


def test_a_cancel_ends_the_wait() -> None:
    start = Start(60, [BUSY], cancel_after=3)
    with pytest.raises(CancelledError, match="enough"):
        wait_for_quiet(start.session)
    assert start.monitor.seen == 3


def test_the_job_s_time_limit_ends_the_wait() -> None:
    start = Start(60, [BUSY])
    start.session.progress.limit(0.01)
    with pytest.raises(DeadlineError):
        wait_for_quiet(start.session)
