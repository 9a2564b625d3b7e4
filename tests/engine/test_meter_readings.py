"""The meters of memory and of kernels, and when a meter is read again."""

import gzip
import json
import mmap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from optigpu.backends.torch.profile import Recording
from optigpu.conductor.processes.rounds import TRIES, Metering, MeterReading
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.documents.peaks import Bound
from optigpu.meters import memory
from optigpu.meters.base import MeterContext
from optigpu.meters.memory import MemoryMeter, ResidentPeak
from optigpu.meters.profile import ProfileMeter
from optigpu.vocabulary import DeviceKind
from tests.engine.measuring import Standing, standing_ready
from tests.engine.meter_contexts import doing, fail, generating, multiplying
from tests.engine.processes import program

pytestmark = pytest.mark.slow

HELD_BYTES = 64 * 2**20


def hold(seconds: float) -> None:
    """Touches 64 MiB, and gives them back to the system."""
    with mmap.mmap(-1, HELD_BYTES) as held:
        for page in range(0, HELD_BYTES, mmap.PAGESIZE):
            held[page] = 1
        time.sleep(seconds)


def resident_bytes() -> int:
    peak = ResidentPeak()
    peak.look()
    return peak.peak_bytes


@pytest.fixture
def no_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that refuses to reset the high-water mark, as under a read-only /proc."""
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "statm").symlink_to("/proc/self/statm")
    (proc / "status").symlink_to("/proc/self/status")
    (proc / "clear_refs").mkdir()  # it cannot be written to
    monkeypatch.setattr(memory, "_PROC", proc)


def test_an_allocation_within_a_request_is_in_the_host_s_peak(tmp_path: Path) -> None:
    context, request = doing(tmp_path, lambda: hold(0))
    before = resident_bytes()
    reading = MemoryMeter().read(context)
    assert request.runs == 1
    assert reading.values["host_peak_bytes"] == pytest.approx(before + HELD_BYTES, abs=8 * 2**20)
    assert reading.facts.model_dump()["host_peak"]["source"].startswith("VmHWM")


@pytest.mark.usefixtures("no_reset")
def test_where_the_mark_cannot_be_reset_samples_give_the_peak_and_say_so(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, lambda: hold(0.3))
    before = resident_bytes()
    reading = MemoryMeter().read(context)
    facts = reading.facts.model_dump()["host_peak"]
    assert reading.values["host_peak_bytes"] == facts["sampled_bytes"]
    assert facts["sampled_bytes"] == pytest.approx(before + HELD_BYTES, abs=8 * 2**20)
    assert facts["samples"] > 2
    assert "samples at 100 Hz" in facts["source"]
    assert "Is a directory" in facts["source"]


def test_every_metric_has_a_number_or_a_reason(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, lambda: None)
    reading = MemoryMeter().read(context)
    assert {*reading.values, *reading.reasons} == set(MemoryMeter.metrics)
    assert "accelerator memory" in reading.reasons["peak_bytes"]
    assert "no model" in reading.reasons["weight_bytes"]


def attached(runtime: Any) -> list[str]:
    """What a pass could have left behind."""
    import torch

    left = ["profiler"] if torch._C._autograd._profiler_enabled() else []
    return left + (["clock"] if type(runtime._place.clock).__name__ != "CpuClock" else [])


def recorded(context: MeterContext, steps: int) -> Recording:
    """One request, of which so many decode steps are recorded."""
    runtime: Any = context.runtime
    recording = Recording(runtime._place.clock, DeviceKind.CPU, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime._place, "clock", recording)
        recording.start()
        context.request.run()
        recording.stop()
    return recording


def test_the_table_names_the_operators_of_a_generation(tmp_path: Path) -> None:
    context = generating(tmp_path, new_tokens=6)
    reading = ProfileMeter().read(context)
    facts = reading.facts.model_dump()["recorded"]["profile"]
    rows = facts["table"]
    assert len(rows) <= 20
    assert [row["share"] for row in rows] == sorted((row["share"] for row in rows), reverse=True)
    assert sum(row["share"] for row in rows) <= 1 + 1e-9
    assert rows[0]["name"].startswith("aten::")
    assert not {"aten::view", "aten::linear", "aten::empty"} & {row["name"] for row in rows}
    assert (facts["steps"], facts["steps_recorded"]) == (5, 5)
    assert attached(context.runtime) == []


def test_decoding_is_memory_bound_and_a_large_product_is_not(tmp_path: Path) -> None:
    decoding = ProfileMeter().read(generating(tmp_path)).values
    assert decoding["memory_bound_share"] > 0.9
    assert decoding["memory_bound_share"] + decoding["compute_bound_share"] == pytest.approx(1)
    product = ProfileMeter().read(multiplying(tmp_path, 512))
    assert product.values["compute_bound_share"] > 0.9
    assert product.facts.model_dump()["recorded"]["profile"]["table"][0]["bound"] == Bound.COMPUTE


def test_the_trace_is_chrome_s_and_kept_under_the_job_s_folder(tmp_path: Path) -> None:
    context = generating(tmp_path)
    readings = [ProfileMeter().read(context) for _ in range(2)]
    paths = [reading.artifacts["trace.json.gz"] for reading in readings]
    assert paths[0] != paths[1]
    assert all(path.is_relative_to(tmp_path / "artifacts") for path in paths)
    with gzip.open(paths[0]) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert {"aten::mm", "optigpu.first", "optigpu.steps"} <= names


def test_a_trace_that_is_too_large_is_not_kept_and_the_numbers_are(tmp_path: Path) -> None:
    reading = ProfileMeter(trace_limit_bytes=100).read(generating(tmp_path))
    assert reading.artifacts == {}
    assert "not kept" in reading.facts.model_dump()["recorded"]["profile"]["trace"]
    assert list((tmp_path / "artifacts").iterdir()) == []
    assert "memory_bound_share" in reading.values


def test_a_request_that_breaks_down_leaves_no_profiler_behind(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, fail)
    with pytest.raises(ZeroDivisionError):
        ProfileMeter().read(context)
    assert attached(context.runtime) == []
    assert ProfileMeter().read(multiplying(tmp_path)).values, "and the next one can be profiled"


QUIET = HostSample(wall_s=1.0, cpus=2, foreign_s=0.0)
BUSY = HostSample(wall_s=1.0, cpus=2, foreign_s=0.5)
BUSIER = HostSample(wall_s=1.0, cpus=2, foreign_s=0.6)


class Told:
    """A monitor that says of each reading what it was told to say."""

    fastest_probe_s = None

    def __init__(self, samples: Sequence[HostSample]) -> None:
        self.left = list(samples)

    def read(self) -> None:
        """A moment is as good as another."""

    def between(self, before: None, after: None) -> HostSample:
        return self.left.pop(0)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    with standing_ready(tmp_path_factory.mktemp("metering"), program("well_behaved")) as standing:
        yield standing


def read(standing: Standing, meter: str, *samples: HostSample) -> tuple[MeterReading, int]:
    """The reading, and how many of the samples were used."""
    told = Told(samples)
    metering = Metering(standing.child, DeviceKind.CPU, cast("HostMonitor", told), standing.progress)
    (reading,) = metering.read([meter])
    return reading, len(samples) - len(told.left)


def test_a_quiet_reading_is_the_only_one(ready: Standing) -> None:
    reading, readings = read(ready, "highest_rate", QUIET, BUSY)
    assert (reading.during, readings) == (QUIET, 1)
    assert reading.metered.meter == "highest_rate"


def test_a_disturbed_one_is_read_again(ready: Standing) -> None:
    reading, readings = read(ready, "highest_rate", BUSY, QUIET, QUIET)
    assert (reading.during, readings) == (QUIET, 2)


@pytest.mark.parametrize("samples", [(BUSY, BUSIER, QUIET), (BUSIER, BUSY, QUIET)])
def test_of_disturbed_ones_the_least_disturbed_counts(
    ready: Standing, samples: tuple[HostSample, ...]
) -> None:
    reading, readings = read(ready, "highest_rate", *samples)
    assert (reading.during, readings) == (BUSY, TRIES)


def test_a_meter_that_times_nothing_is_read_once_and_not_watched(ready: Standing) -> None:
    reading, readings = read(ready, "memory", BUSY)
    assert (reading.during, readings) == (None, 0)
