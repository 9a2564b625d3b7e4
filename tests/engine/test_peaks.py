"""The machine's own peaks: really measured by a separate process, kept for a day, and never in a job's way."""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch import peak_rates as torch_peaks
from optigpu.conductor.peak_cache import PEAKS, measured_peaks
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.progress import JobProgress
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.hardware import probe
from optigpu.vocabulary import CancelledError, DeviceKind
from tests.engine.processes import is_alive, program

CPU = DeviceKind.CPU


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "optigpu"


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Peaks | None]:
    """Asks for peaks by a child that answers at once; `asked.times()` says how often it really was started."""
    log = tmp_path / "asked"

    def ask(
        environment: Environment | None = None, device: DeviceKind = CPU, threads: int = 2
    ) -> Peaks | None:
        peaking = program("peaking", log)
        return measured_peaks(environment or probe(), device, threads, progress(), program=peaking)

    ask.times = lambda: len(log.read_text().splitlines())  # type: ignore[attr-defined]
    return ask


def progress(reason: str | None = None) -> JobProgress:
    return JobProgress(lambda _: None, lambda: reason, [0], 1)


def kept(cache_dir: Path) -> Path:
    (file,) = (cache_dir / "peaks").iterdir()
    return file


def test_a_real_process_measures_this_machine(cache_dir: Path) -> None:
    peaks = measured_peaks(probe(), CPU, 2, progress())
    assert peaks is not None
    sizes = [read.array_bytes for read in peaks.reads]
    assert sizes == sorted(set(sizes))
    assert sizes[0] == torch_peaks.SMALLEST_ARRAY_BYTES
    assert (peaks.device, peaks.threads) == (CPU, 2)
    assert peaks.torch == probe().software["torch"]
    assert {*peaks.matmul_flops_per_s, *peaks.reasons} == set(torch_peaks.DTYPES[CPU])
    assert "float32" in peaks.matmul_flops_per_s
    assert Peaks.model_validate_json(kept(cache_dir).read_text()) == peaks
    again = measured_peaks(probe(), CPU, 2, progress(), program=(sys.executable, "-c", "raise SystemExit(1)"))
    assert again == peaks, "it was measured again"


def test_the_process_ends_when_its_stdin_closes() -> None:
    child = Child(PEAKS, child_variables(1))
    with child:
        assert is_alive(child.pid)
    assert child.end(0.0) == 0


def test_a_day_later_it_is_measured_again(cache_dir: Path, asked: Any) -> None:
    assert asked() == asked()
    assert asked.times() == 1
    for moment in (datetime.now(UTC) - timedelta(days=1), datetime.now(UTC) + timedelta(hours=1)):
        document = json.loads(kept(cache_dir).read_text()) | {"measured_at": moment.isoformat()}
        kept(cache_dir).write_text(json.dumps(document))
        before = asked.times()
        assert asked().measured_at != moment
        assert asked.times() == before + 1


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\xfe", b'{"kind": "peaks", "reads": []}', b"[1, 2"], ids=repr
)
def test_what_is_no_record_of_peaks_is_measured_again(cache_dir: Path, asked: Any, content: bytes) -> None:
    first = asked()
    kept(cache_dir).write_bytes(content)
    assert asked() != first
    assert asked.times() == 2


@pytest.mark.parametrize("change", [{"bytes_per_s": 0}, {"bytes_per_s": -1}, {"bytes_per_s": "fast"}])
def test_a_record_with_an_impossible_rate_is_measured_again(
    cache_dir: Path, asked: Any, change: dict[str, Any]
) -> None:
    asked()
    document = json.loads(kept(cache_dir).read_text())
    document["reads"][0] |= change
    kept(cache_dir).write_text(json.dumps(document))
    assert asked().reads[0].bytes_per_s == 1e9
    assert asked.times() == 2


def test_another_machine_device_torch_or_number_of_threads_has_peaks_of_its_own(asked: Any) -> None:
    here = probe()
    others = (
        {"hardware_class": "another"},
        {"host_id": "another"},
        {"software": here.software | {"torch": "0.0"}},
    )
    for change in others:
        asked(here.model_copy(update=change))
    asked(threads=1)
    asked(device=DeviceKind.CUDA)
    asked()
    assert asked.times() == len(others) + 3


def test_without_a_place_to_keep_them_they_are_measured_all_the_same(cache_dir: Path, asked: Any) -> None:
    cache_dir.parent.mkdir(parents=True)
    cache_dir.write_text("a file where the folder should be")
    assert asked() is not None
    assert asked() is not None
    assert asked.times() == 2


@pytest.mark.parametrize("child", ["dying", "garbage"])
def test_a_process_that_fails_leaves_none_and_the_reason_in_the_log(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, child: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert measured_peaks(probe(), CPU, 2, progress(), program=program(child)) is None
    assert "peak rates could not be measured" in caplog.text
    assert not (cache_dir / "peaks").exists()


def test_a_job_that_is_cancelled_meanwhile_ends_at_once() -> None:
    with pytest.raises(CancelledError, match="enough"):
        measured_peaks(probe(), CPU, 2, progress("enough"), program=program("hanging"))


def test_a_dtype_that_torch_cannot_multiply_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_peaks.DTYPES, CPU, ("float32", "float128"))
    monkeypatch.setattr(torch_peaks, "MATRIX_SIDES", (16,))
    rates, reasons = torch_peaks.matmul_rates(CPU)
    assert list(rates) == ["float32"]
    assert "float128" in reasons["float128"]


def test_a_call_is_timed_by_what_the_clock_says_of_many() -> None:
    class Counting:
        """Each call of the work takes 2 ms."""

        def __init__(self) -> None:
            self.calls = 0

        def work(self) -> None:
            self.calls += 1

        def mark(self) -> int:
            return self.calls

        def seconds(self, marks: Sequence[int]) -> list[float]:
            return [0.002 * (marks[1] - marks[0])]

    counting = Counting()
    assert torch_peaks._typical_s(counting.work, counting, 0.05) == pytest.approx(0.002)
    assert counting.calls * 0.002 < 0.1, "it took twice the time that it was given"


@pytest.mark.gpu
def test_a_gpu_is_measured_in_all_its_dtypes() -> None:
    found = torch_peaks.bandwidth(DeviceKind.CUDA)
    assert min(found.reads.values()) > 0
    rates, reasons = torch_peaks.matmul_rates(DeviceKind.CUDA)
    assert {*rates, *reasons} == set(torch_peaks.DTYPES[DeviceKind.CUDA])
    assert {"float32", "float16"} <= set(rates)
