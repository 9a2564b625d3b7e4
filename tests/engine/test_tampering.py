"""Measuring processes that try to look better than they are are found out, also on a machine that is busy.

tests/gpu/test_attacks.py has those that need another stream or another device.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from optigpu.backends import BACKENDS
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.documents.result import VerdictReason
from optigpu.hardware.probe import probe
from optigpu.vocabulary import DeviceKind
from tests.engine.children.attacks import put_back
from tests.engine.children.tampered import tamper
from tests.engine.in_process import in_process
from tests.engine.measuring import measured, standing, standing_ready, verdict, verdict_as_if_alone
from tests.engine.processes import program, wait_until

pytestmark = pytest.mark.usefixtures("forked_children")

HINDERED_S = 1.0
"""CPU time that a process uses in a pause."""
ATTACKS: dict[str, dict[str, str]] = {
    "NotANumber": {"output_invalid": "NaN or infinite"},
    "LosesOne": {"output_invalid": "instead of (1, 8)"},
    "SpoiledLater": {"output_invalid": "NaN or infinite"},
    "ChangesInputs": {"output_invalid": "changed its own inputs"},
    "ChangesTimedInputs": {"output_invalid": "changed its own inputs"},
    "AnswersFirst": {"output_invalid": "are not what the engine predicts"},
    "ReadsTheReference": {"output_invalid": "are not what the engine predicts"},
    "MakesUpTokens": {"output_invalid": "are not what the engine predicts"},
    "KnowsTheSeed": {"cached_result": "Requests with fresh inputs took at least"},
    "FinishesLater": {"clock_contradicted": "% of the time that a request takes"},
    "TellsHalf": {"clock_contradicted": "% of the time that a request takes"},
    "SlowsTheClock": {
        "clock_contradicted": "neither messages nor other processes explain",
        "harness_replaced": "time.perf_counter, time.perf_counter_ns was replaced",
    },
    "SetsTheTime": {"harness_replaced": "time.time was replaced"},
    "PraisesItself": {"harness_replaced": "optigpu.meters.memory.MemoryMeter.read was replaced"},
    "HalfPrecision": {"undeclared_rounding": "Matrices were multiplied in bfloat16"},
}
"""The reasons that each attack has, with words of their notes."""


@pytest.mark.slow
def test_an_answer_from_memory_is_a_cached_result(tmp_path: Path) -> None:
    with standing_ready(tmp_path, program("tampered", "Remembers")) as process:
        judged = verdict(measured(process))
    assert VerdictReason.CACHED_RESULT in judged.reasons
    assert VerdictReason.OUTPUT_INVALID not in judged.reasons, "what it gives is right"


@pytest.fixture
def undone() -> Iterator[None]:
    """What an attack replaced in this process is put back."""
    yield
    put_back()


@pytest.mark.slow
@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize("tampering", ATTACKS)
def test_an_attack_is_invalid_with_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tampering: str
) -> None:
    """What measures runs in this process: what finds these out is in it, or is the clock of the conductor."""
    monkeypatch.setattr(BACKENDS["torch"], "prepare", tamper(tampering))
    with in_process() as child:
        replicate = measured(standing(child, tmp_path), rounds=1)
    judged = verdict_as_if_alone(replicate)
    notes = dict(zip(judged.reasons, judged.reason_notes, strict=True))
    for reason, words in ATTACKS[tampering].items():
        assert words in notes[VerdictReason(reason)]
    if tampering in ("NotANumber", "LosesOne", "SpoiledLater"):
        assert (replicate.ready.problem is None) == (tampering == "SpoiledLater"), "when it can be seen"


@pytest.mark.slow
def test_a_warm_up_that_sleeps_and_work_in_a_pause_are_found(tmp_path: Path) -> None:
    """It works while other variants are timed, so that these look slow."""
    with standing_ready(tmp_path, program("tampered", "RestsThenHinders")) as process:
        timed = process.timed_rounds(HostMonitor(DeviceKind.CPU, probe(), lambda: {process.child.pid}))
        timed.measure_one(process.progress)
        before_s = used_s(process.child.pid)
        wait_until(lambda: used_s(process.child.pid) > before_s + HINDERED_S)
        timed.measure_one(process.progress)
        replicate = timed.replicate()
    assert replicate.warm_up is not None
    judged = verdict(replace(replicate, warm_up=as_if_alone(replicate.warm_up)))
    notes = dict(zip(judged.reasons, judged.reason_notes, strict=True))
    assert "All CPUs rested for" in notes[VerdictReason.WARM_UP_SLEPT]
    assert "in which it was asked nothing" in notes[VerdictReason.WORKED_WHILE_IDLE]


def used_s(pid: int) -> float:
    """CPU seconds of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def as_if_alone(sample: HostSample) -> HostSample:
    """What would have been counted if nothing else had run on this machine meanwhile."""
    assert None not in (sample.idle_s, sample.foreign_s, sample.steal_s)
    idle_s = (sample.idle_s or 0.0) + (sample.foreign_s or 0.0) + (sample.steal_s or 0.0)
    return replace(sample, idle_s=idle_s, foreign_s=0.0, steal_s=0.0)
