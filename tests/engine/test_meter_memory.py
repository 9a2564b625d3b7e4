"""What a known allocation within a request shows in the memory meter."""

import errno
import mmap
import time
from pathlib import Path

import pytest

from optigpu.hardware.sensors import Ticker
from optigpu.meters import memory
from optigpu.meters.memory import MemoryMeter, ResidentPeak
from tests.engine.meter_contexts import doing, fail, generating, tickers

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


def test_what_was_held_before_the_request_and_given_back_is_not(tmp_path: Path) -> None:
    hold(0)
    context, _ = doing(tmp_path, lambda: None)
    before = resident_bytes()
    peak = MemoryMeter().read(context).values["host_peak_bytes"]
    assert peak == pytest.approx(before, abs=8 * 2**20)


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


def test_bytes_per_parameter_follow_from_the_weights(tmp_path: Path) -> None:
    context = generating(tmp_path)
    values = MemoryMeter().read(context).values
    assert values["params_total"] == 361_088
    assert values["bytes_per_param"] == values["weight_bytes"] / 361_088
    assert 4 * 361_088 <= values["weight_bytes"] < 4.01 * 361_088


def test_every_metric_has_a_number_or_a_reason(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, lambda: None)
    reading = MemoryMeter().read(context)
    assert {*reading.values, *reading.reasons} == set(MemoryMeter.metrics)
    assert "accelerator memory" in reading.reasons["peak_bytes"]
    assert "no model" in reading.reasons["weight_bytes"]


def test_a_request_that_breaks_down_leaves_no_sampler_behind(tmp_path: Path) -> None:
    context, _ = doing(tmp_path, fail)
    with pytest.raises(ZeroDivisionError):
        MemoryMeter().read(context)
    assert tickers() == 0


def test_an_error_of_the_sampler_ends_it_and_is_raised_at_the_end() -> None:
    looks: list[int] = []

    def look() -> None:
        looks.append(len(looks))
        if len(looks) == 3:
            raise OSError(errno.EIO, "gone")

    def wait() -> None:
        with Ticker(look, 0.001) as ticker:
            while not ticker.failed:
                time.sleep(0.001)

    with pytest.raises(OSError, match="gone"):
        wait()
    assert (looks, tickers()) == ([0, 1, 2], 0)


def test_a_sampler_looks_at_once_and_at_the_end() -> None:
    looks: list[float] = []
    with Ticker(lambda: looks.append(time.perf_counter()), 60):
        assert len(looks) == 1
    assert len(looks) == 2
