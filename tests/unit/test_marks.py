"""What marks a round or a meter's reading, which rounds figures come from, and how far intervals reach."""

from dataclasses import replace
from typing import Any

import pytest

from optigpu.child.messages import Metered
from optigpu.conductor.processes.rounds import MeterReading, Replicate
from optigpu.conductor.verdicts.cost import together, widened
from optigpu.conductor.verdicts.disturbance import INTERRUPTION, Goal, Yardstick, select
from optigpu.conductor.verdicts.host_monitor import SERVICE, HostSample, is_service
from optigpu.conductor.verdicts.outside import bounds_of_readings
from optigpu.documents.result import MetricSummary, Verdict, VerdictReason, VerdictWarning
from optigpu.documents.rounds import RoundMark
from optigpu.vocabulary import Better, DeviceKind
from tests.unit.made_replicates import QUIET, ROUNDS, evidence, replicate, seen, spec, verdict

ROUND = HostSample(wall_s=0.4, cpus=2, foreign_s=0.01, idle_s=0.2, steal_s=0.0, probe_s=0.0025)
YARDSTICK = Yardstick(DeviceKind.CPU, fastest_probe_s=0.0024)


@pytest.mark.parametrize(
    ("found", "mark"),
    [
        ({"foreign_s": 0.06}, RoundMark.OTHERS),
        ({"steal_s": 0.06}, RoundMark.STEAL),
        ({"quota_wait_s": 0.02}, RoundMark.QUOTA),
        ({"gpu_heat_s": 0.02}, RoundMark.HEAT),
        ({"heat_slowdowns": 1}, RoundMark.HEAT),
        ({"gpu_foreign": 1}, RoundMark.OTHERS_ON_GPU),
        ({"suspended_s": 5.0}, RoundMark.SUSPENDED),
        ({"probe_s": 0.0031}, RoundMark.SLOW_PROBE),
        ({"backwards": ("of the CPUs' time",)}, RoundMark.UNCOUNTED),
    ],
)
def test_what_disturbs_a_round_marks_it(found: dict[str, Any], mark: RoundMark) -> None:
    assert YARDSTICK.marks(replace(ROUND, **found)) == (mark,)


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"foreign_s": 0.03},
        {"foreign_s": -0.02},
        {"foreign_s": None, "steal_s": None, "probe_s": None},
        {"wall_s": 0.05, "foreign_s": 0.04, "probe_s": 0.01},
        {"cpus": 64, "foreign_s": 0.2},
        {"probe_s": 0.0029},
        {"quota_wait_s": 0.005},
    ],
)
def test_a_quiet_round_has_no_mark(found: dict[str, Any]) -> None:
    assert YARDSTICK.marks(replace(ROUND, **found)) == ()


def test_a_gpu_is_not_slowed_by_cpu_time_that_it_does_not_need() -> None:
    on_gpu = Yardstick(DeviceKind.CUDA, fastest_probe_s=0.0024)
    busy = replace(ROUND, cpus=16, foreign_s=3.0, probe_s=0.01)
    assert on_gpu.marks(replace(busy, idle_s=0.3)) == ()
    assert on_gpu.marks(replace(busy, idle_s=0.1)) == (RoundMark.OTHERS,)


BUSY = replace(ROUND, foreign_s=0.2)
GOAL = Goal(seconds=4.0, requests=6)


@pytest.mark.parametrize(("clean", "busy", "kept"), [(5, 10, 50), (4, 10, 140), (10, 0, 100), (2, 0, 20)])
def test_figures_come_from_clean_rounds_where_these_are_enough(clean: int, busy: int, kept: int) -> None:
    """Ten requests a round; half of the least time is enough, since no more of it could be had."""
    host_samples = [ROUND] * clean + [BUSY] * busy
    selection = select([10] * len(host_samples), host_samples, YARDSTICK, GOAL)
    values = list(range(10 * len(host_samples)))
    assert selection.of(values) == tuple(values[:kept])
    assert selection.is_disturbed is (kept > 10 * clean)
    assert [record.marks for record in selection.records] == [()] * clean + [(RoundMark.OTHERS,)] * busy
    assert selection.records[-1].others_cores == pytest.approx(0.5 if busy else 0.025)


def summary(better: Better, ci: tuple[float, float] | None) -> MetricSummary:
    return MetricSummary(unit="s", better=better, value=10.0, ci=ci)


def test_an_interval_reaches_to_the_undisturbed_side_alone() -> None:
    metrics = {
        "time": summary(Better.LOWER, (9.0, 11.0)),
        "rate": summary(Better.HIGHER, (9.0, 11.0)),
        "few": summary(Better.LOWER, None),
        "load": summary(Better.LOWER, (9.0, 11.0)),
    }
    wider = widened(metrics, dict.fromkeys(("time", "rate", "few"), 0.2))
    assert wider["time"].ci == pytest.approx((7.2, 11.0))
    assert wider["rate"].ci == pytest.approx((9.0, 13.75))
    assert wider["few"].ci is None
    assert wider["load"] == metrics["load"], "it is not one of the requests' metrics"
    assert widened(metrics, dict.fromkeys(metrics, 0.0)) == metrics
    assert widened(metrics, {"time": None})["time"].ci is None, "what has no bound has no interval"


def test_the_bound_of_several_processes_is_that_of_their_mean() -> None:
    assert together([0.2, 0.2]) == pytest.approx(0.2)
    assert 0.1 < together([0.0, 0.2]) < 0.12
    assert together([0.0, 0.99]) == 1


def test_a_load_that_is_bounded_is_a_mark_that_says_who_used_how_much() -> None:
    loaded = [seen(foreign_s=0.25, named={"cc1plus": 0.24, "ls": 0.001})] * 3
    judged = verdict(*loaded)
    assert judged.valid
    assert judged.warnings == (VerdictWarning.DISTURBED,)
    assert judged.cost_bound == pytest.approx(0.2 * INTERRUPTION)
    assert judged.notes == (
        "Other processes used 0.20 of 2 cores (cc1plus 0.19) during replicate 1 (and during replicates 2 and 3); stop "
        "them and measure again. This can have cost up to 27% of the speed, and the intervals reach that far.",
    )
    above = verdict(*[seen(foreign_s=0.5)] * 3)
    assert above.reasons == (VerdictReason.FOREIGN_PROCESS,)
    assert above.warnings == ()


def test_a_slow_probe_is_a_mark_and_never_a_reason() -> None:
    fast, slow = replace(QUIET, probe_s=0.0025), replace(QUIET, probe_s=0.005)
    judged = verdict(
        *[replicate(host_samples=(slow,) * ROUNDS), replicate(host_samples=(fast,) * ROUNDS)] * 2
    )
    assert judged.valid
    assert (
        "computed 2.00 times slower than at its fastest in this job during replicate 1 (and"
        in judged.notes[0]
    )
    assert judged.cost_bound == pytest.approx(1 / 3, rel=0.02)


def test_a_counter_that_goes_backwards_is_said_and_nothing_is_made_of_it() -> None:
    unknown: dict[str, Any] = {
        "foreign_s": None,
        "idle_s": None,
        "steal_s": None,
        "backwards": ("of the CPUs' time",),
    }
    judged = verdict(seen(**unknown))
    assert judged.valid
    assert judged.cost_bound == 0
    assert judged.notes[0].startswith(
        "The kernel's count of the CPUs' time went backwards during replicate 3; this hides what others used."
    )
    once = replicate(host_samples=(replace(QUIET, **unknown), *(QUIET,) * 3))
    assert verdict(once) == Verdict(valid=True), "that round is set aside"


def test_a_machine_that_slept_once_has_a_round_less() -> None:
    slept = replicate(host_samples=(*(QUIET,) * 3, replace(QUIET, suspended_s=3600.0)))
    assert verdict(slept) == Verdict(valid=True)
    assert verdict(seen(suspended_s=3600.0)).reasons == (VerdictReason.INTERRUPTED,)


def test_our_own_service_counts_and_nobody_is_asked_to_stop_it() -> None:
    judged = verdict(seen(foreign_s=0.25, named={SERVICE: 0.25}))
    assert (
        "OptiGPU's own service used 0.20 of 2 cores during replicate 3; leave its pages alone"
        in judged.notes[0]
    )
    assert "Other processes" not in judged.notes[0]


@pytest.mark.parametrize(
    "command",
    [
        "/venv/bin/python -m api --port 8000",
        "python3 -P -m worker --device cpu",
        "/usr/bin/python /usr/local/bin/celery -A worker.app worker",
        "python /venv/bin/optigpu run",
    ],
)
def test_the_api_and_its_workers_are_our_service(command: str) -> None:
    assert is_service(command.split())


@pytest.mark.parametrize("command", ["", "cc1plus api", "python -m pytest", "bash -m api", "python -m"])
def test_other_programs_are_not(command: str) -> None:
    assert not is_service(command.split())


RATE = "highest_rate_per_s"
LONG = replace(QUIET, wall_s=60.0, foreign_s=1.0, idle_s=50.0)
SHARED = replace(LONG, foreign_s=12.0, named={"make": 12.0})
"""Others used a fifth of a core."""


def read(*during: HostSample | None) -> list[Replicate]:
    """A replicate for each, whose rounds were quiet."""
    metered = Metered(meter="highest_rate", values={RATE: 50.0})
    return [replicate(readings=(MeterReading(metered, each),)) for each in during]


def bounds(*during: HostSample | None) -> dict[str, float | None]:
    return bounds_of_readings(evidence(read(*during), spec()))


def test_what_others_used_meanwhile_is_said_and_bounded() -> None:
    judged = verdict(*read(LONG, SHARED, LONG))
    assert judged.valid
    assert judged.warnings == (VerdictWarning.DISTURBED,)
    (note,) = judged.notes
    assert note.startswith(
        "Other processes used 0.20 of 2 cores (make 0.20) while the highest_rate meter was read;"
    )
    assert note.endswith("This can have cost up to 11%.")
    assert judged.cost_bound == 0, "the timed rounds were quiet"


def test_the_interval_reaches_to_where_it_would_be_undisturbed() -> None:
    found = bounds(SHARED)
    assert found == {RATE: pytest.approx(INTERRUPTION * 0.2)}
    summary = MetricSummary(unit="1/s", better=Better.HIGHER, value=50.0, ci=(40.0, 60.0), n=3, replicates=3)
    wider = widened({RATE: summary}, found)[RATE]
    assert wider.ci is not None
    assert wider.ci[0] == 40.0
    assert wider.ci[1] == pytest.approx(60 / (1 - INTERRUPTION * 0.2))


def test_a_machine_that_slept_meanwhile_leaves_no_interval() -> None:
    slept = replace(LONG, suspended_s=5.0)
    assert bounds(slept) == {RATE: None}
    judged = verdict(*read(slept, LONG, LONG))
    assert "suspended for 5.0 s while the highest_rate meter was read" in judged.notes[0]
    assert judged.notes[0].endswith("What this cost is not known.")
