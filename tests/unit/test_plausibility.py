"""Which reports of devices can be true: each reason and flag by itself, at its bound."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.device_messages import FAR_SLOWER, FEWEST, Evidence, judge
from benchmarks import signing_device
from benchmarks.signing_device import BOARD, MODEL, OUTPUTS, RUN_US, golden
from optigpu.documents.devices import DeviceReport, DeviceSource, Flag, Reason, ReportState
from optigpu.documents.manifest import ModelManifest
from optigpu.edge.fit import predict
from optigpu.hardware.catalog import board
from optigpu.statistics.intervals import fewest_for
from optigpu.store.edge_reports import StartedRun

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
NOON_US = int(NOON.timestamp() * 1e6)
RUN_ID = "01980000-0000-7000-8000-000000000000"
BOOT = "b" * 16
MACS = 11_000_000
S3 = board(BOARD)


def a_manifest(**changes: Any) -> ModelManifest:
    return ModelManifest.model_validate(signing_device.manifest() | changes)


def a_report(**changes: Any) -> DeviceReport:
    """Five windows of 10 s at 78.5 ms, in a run of 55 s that ended at noon."""
    document = signing_device.report(BOOT, 1) | {
        "run_id": RUN_ID,
        "golden": {"count": len(OUTPUTS), "digest": golden(RUN_ID)},
        "started_us": NOON_US - RUN_US,
    }
    return DeviceReport.model_validate(document | changes)


EVIDENCE = Evidence(
    received_at=NOON,
    source=DeviceSource.DEVICE,
    device_board=BOARD,
    clock_synchronised=True,
    waited_us=0,
    run=StartedRun(id=RUN_ID, started_at=NOON - timedelta(seconds=55), boot_id=BOOT, model_sha256=MODEL),
    manifest=a_manifest(),
    board=S3,
)


def reasons(report: DeviceReport, **changes: Any) -> tuple[Reason, ...]:
    return judge(report, replace(EVIDENCE, **changes)).reasons


def seen(seconds: float) -> StartedRun:
    """A run whose start the server saw so long before the report."""
    started_at = NOON - timedelta(seconds=seconds)
    return StartedRun(id=RUN_ID, started_at=started_at, boot_id=BOOT, model_sha256=MODEL)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (52.0, (Reason.LONGER_THAN_OBSERVED,)),
        (53.5, ()),
        (55.0, ()),
        (61.6, ()),
        (62.0, (Reason.SHORTER_THAN_OBSERVED,)),
        (86_400.0, (Reason.SHORTER_THAN_OBSERVED,)),
    ],
)
def test_the_devices_time_is_held_against_the_servers(seconds: float, expected: tuple[Reason, ...]) -> None:
    assert reasons(a_report(), run=seen(seconds)) == expected
    assert all(reason.quarantines for reason in expected)


def paced(us: int, **changes: Any) -> DeviceReport:
    """Five windows of 10 s, in which each request takes so long."""
    count = 10_000_000 // us + 1
    windows = [{"count": count, "total_us": count * us, "energy_uj": None}] * 5
    p99 = us if 5 * count >= FEWEST["p99"] else None
    latency = {"count": 5 * count, "min": us, "p50": us, "p90": us, "p99": p99}
    return a_report(windows=windows, latency_us=latency, **{"ticks_us": 5 * count * us} | changes)


def test_the_roofline_is_all_cores_at_the_fastest_clock() -> None:
    assert S3 is not None
    bound = MACS / (240e6 * S3.chip.cores * S3.chip.int8_macs_per_cycle) * 1e6
    for us, too_fast in ((int(bound) - 1, True), (int(bound) + 1, False)):
        run = {"ticks_us": a_report().ticks_us}
        assert (Reason.FASTER_THAN_ROOFLINE in reasons(paced(us, **run))) is too_fast
        on_host = paced(us, runner={"name": "tflm-host", "version": "1"}, **run)
        assert reasons(on_host) == (Reason.HOST,)


def test_one_window_or_the_least_time_alone_can_be_too_fast() -> None:
    fast = {"count": 128, "total_us": 128, "energy_uj": None}
    windows = [*[{"count": 128, "total_us": 10_048_000, "energy_uj": None}] * 5, fast]
    latency = {"count": 768, "min": 1, "p50": 78_480, "p90": 78_900, "p99": 79_000}
    assert Reason.FASTER_THAN_ROOFLINE in reasons(a_report(windows=windows, latency_us=latency))
    least = a_report().latency_us.model_dump() | {"min": 5}
    assert Reason.FASTER_THAN_ROOFLINE in reasons(a_report(latency_us=least))


WITHOUT_ENERGY = [{"count": 128, "total_us": 10_048_000, "energy_uj": None}] * 5
LATENCY = {"count": 640, "min": 78_310, "p50": 78_480, "p90": 78_900, "p99": None}


@pytest.mark.parametrize(
    "changes",
    [
        {"latency_us": LATENCY | {"count": 639}},
        {"latency_us": LATENCY | {"min": None}},
        {"latency_us": LATENCY | {"min": 90_000}},
        {"latency_us": LATENCY | {"p50": 79_800}},
        {"latency_us": LATENCY | {"p50": None}},
        {"latency_us": LATENCY | {"p99": 80_000}},
        {"latency_us": LATENCY | {"p90": 700_000}},
        {"ticks_us": 50_239_999},
        {"board": "esp32s3-n8"},
        {"input_bytes": 96 * 96},
        {"clock_hz": 480_000_000},
        {"arena_bytes": 100_000_000},
        {"power": {"source": "none", "idle_uw": None}},
        {"power": {"source": "none", "idle_uw": 5}, "windows": WITHOUT_ENERGY},
        {"windows": [{"count": 128, "total_us": 10_048_000, "energy_uj": 0}] * 5},
        {"windows": [{"count": 128, "total_us": 10_048_000, "energy_uj": 10**12}] * 5},
    ],
)  # fmt: skip
def test_figures_that_contradict_each_other_are_inconsistent(changes: dict[str, Any]) -> None:
    assert Reason.INCONSISTENT in reasons(a_report(**changes))
    assert judge(a_report(**changes), EVIDENCE).state is ReportState.QUARANTINED


@given(st.data())
def test_percentiles_of_any_true_run_are_consistent(data: st.DataObject) -> None:
    """Whatever the times were: their own windows and percentiles never contradict each other by our rule, unless they
    are so skewed that half of the windows are twice as slow as p90."""
    base = data.draw(st.integers(3_000, 200_000))
    jitter = data.draw(st.lists(st.integers(0, base), min_size=5, max_size=800))
    times = [base + extra for extra in jitter]
    size = max(1, len(times) // 5)
    parts = [times[at : at + size] for at in range(0, len(times), size)]
    ordered = sorted(times)

    def percentile(percent: int, name: str) -> int | None:
        return ordered[(len(times) - 1) * percent // 100] if len(times) >= FEWEST[name] else None

    latency = {
        "count": len(times),
        "min": ordered[0],
        "p50": percentile(50, "p50"),
        "p90": percentile(90, "p90"),
        "p99": percentile(99, "p99"),
    }
    windows = [{"count": len(part), "total_us": sum(part), "energy_uj": None} for part in parts]
    sent = a_report(windows=windows, latency_us=latency, ticks_us=sum(times) + 1000)
    found = reasons(sent, run=seen(sum(times) / 1e6))
    assert Reason.INCONSISTENT not in found
    assert Reason.FASTER_THAN_ROOFLINE not in found


def test_the_fewest_requests_are_those_of_the_engine() -> None:
    assert {f"p{percent}": fewest_for(percent) for percent in (50, 90, 99)} == FEWEST


def test_the_golden_outputs_are_bound_to_the_run() -> None:
    plain = {"count": len(OUTPUTS), "digest": golden(None)}
    assert reasons(a_report(golden=plain)) == (Reason.GOLDEN_FAILED,)
    assert judge(a_report(golden=plain), EVIDENCE).state is ReportState.QUARANTINED
    unwitnessed = a_report(golden=plain, run_id=None)
    assert reasons(unwitnessed, run=None) == (Reason.UNWITNESSED,)
    assert reasons(a_report(golden=None)) == (Reason.GOLDEN_FAILED,)
    assert reasons(a_report(golden=a_report().golden.model_dump() | {"count": 1})) == (Reason.GOLDEN_FAILED,)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"run": None}, (Reason.RUN_UNKNOWN,)),
        ({"run": seen(55).model_copy(update={"boot_id": "d" * 16})}, (Reason.RUN_UNKNOWN,)),
        ({"run": seen(55).model_copy(update={"model_sha256": "d" * 64})}, (Reason.RUN_UNKNOWN,)),
        ({"run": seen(55).model_copy(update={"reported": True})}, (Reason.RUN_REUSED,)),
        ({"manifest": None}, (Reason.MODEL_UNKNOWN,)),
        ({"manifest": a_manifest(rankable=False)}, (Reason.MODEL_NOT_RANKABLE,)),
        ({"board": None}, (Reason.BOARD_UNKNOWN,)),
        ({"source": DeviceSource.SIMULATOR}, (Reason.SIMULATOR,)),
    ],
)
def test_each_thing_that_the_server_knows_has_its_reason(
    changes: dict[str, Any], expected: tuple[Reason, ...]
) -> None:
    assert reasons(a_report(), **changes) == expected


@pytest.mark.parametrize(
    ("report", "changes", "flags"),
    [
        ({}, {"clock_synchronised": False}, (Flag.CLOCK_UNSYNCHRONISED,)),
        ({"started_us": 0}, {}, (Flag.CLOCK_UNSYNCHRONISED,)),
        ({"started_us": 946_684_800_000_000}, {}, (Flag.CLOCK_UNSYNCHRONISED,)),
        ({"started_us": NOON_US + 301_000_000}, {}, (Flag.CLOCK_UNSYNCHRONISED,)),
        ({"started_us": NOON_US + 299_000_000}, {}, ()),
    ],
)
def test_flags_change_nothing_of_the_rank(
    report: dict[str, Any], changes: dict[str, Any], flags: tuple[Flag, ...]
) -> None:
    judgement = judge(a_report(**report), replace(EVIDENCE, **changes))
    assert (judgement.flags, judgement.ranked) == (flags, True)


@pytest.mark.parametrize(("share", "flags"), [(1.01, (Flag.SLOWER_THAN_PUBLISHED,)), (0.99, ())])
def test_a_device_that_is_far_slower_than_published_is_flagged(share: float, flags: tuple[Flag, ...]) -> None:
    us = int(FAR_SLOWER * predict(MACS).high_s * 1e6 * share)
    judgement = judge(paced(us), EVIDENCE)
    assert judgement.flags == flags
    assert Reason.INCONSISTENT not in judgement.reasons
