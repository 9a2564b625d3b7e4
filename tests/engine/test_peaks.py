"""The machine's own peaks: really measured by a separate process, kept for a day, and never in a job's way."""

import json
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch import peak_rates as torch_peaks
from optigpu.conductor.peak_cache import PEAKS, MachinePeaks
from optigpu.conductor.preparation import Preparation
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.progress import JobProgress
from optigpu.documents.facts import RunFacts
from optigpu.documents.peaks import Peaks, ReadRate
from optigpu.documents.result import Environment
from optigpu.hardware import probe
from optigpu.ops.rates.rates import PRODUCTS, WAYS, RateLoops
from optigpu.vocabulary import CancelledError, DeviceKind
from optigpu.workloads.matmul import Matmul
from tests.engine.caches import OPERATORS, cache_with
from tests.engine.processes import is_alive, program
from tests.unit.made_results import metric

CPU = DeviceKind.CPU


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, with the operators that were built before."""
    folder = cache_with(tmp_path, OPERATORS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return folder


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Peaks | None]:
    """Asks for peaks by a child that answers at once; `asked.times()` says how often it really was started."""
    log = tmp_path / "asked"

    def ask(
        environment: Environment | None = None, device: DeviceKind = CPU, threads: int = 2
    ) -> Peaks | None:
        return MachinePeaks(
            environment or probe(), device, threads, progress(), program=program("peaking", log)
        ).known

    ask.times = lambda: len(log.read_text().splitlines())  # type: ignore[attr-defined]
    return ask


def progress(reason: str | None = None) -> JobProgress:
    return JobProgress(lambda _: None, lambda: reason, [0], 1)


def kept(cache_dir: Path) -> Path:
    (file,) = (cache_dir / "peaks").iterdir()
    return file


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
    (cache_dir / "peaks").write_text("a file where the folder should be")
    assert asked() is not None
    assert asked() is not None
    assert asked.times() == 2


@pytest.mark.parametrize("child", ["dying", "garbage"])
def test_a_process_that_fails_leaves_none_and_the_reason_in_the_log(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, child: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert MachinePeaks(probe(), CPU, 2, progress(), program=program(child)).known is None
    assert "peak rates could not be measured" in caplog.text
    assert not (cache_dir / "peaks").exists()


def test_a_job_that_is_cancelled_meanwhile_ends_at_once() -> None:
    with pytest.raises(CancelledError, match="enough"):
        _ = MachinePeaks(probe(), CPU, 2, progress("enough"), program=program("hanging")).known


def test_a_dtype_that_torch_cannot_multiply_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_peaks.DTYPES, CPU, ("float32", "float128"))
    monkeypatch.setattr(torch_peaks, "MATRIX_SIDES", (16,))
    monkeypatch.setattr(torch_peaks, "MATMUL_S", 0.001)
    rates, ways, reasons = torch_peaks.matmul_rates(CPU, loops=None)
    assert list(rates) == ["float32"]
    assert ways == {"float32": "torch"}
    assert "float128" in reasons["float128"]


class Disturbed:
    """Calls that take 2 ms each, and those of some samples three times as long."""

    def __init__(self, *disturbed: int) -> None:
        self.counts: list[int] = []
        self._disturbed = disturbed

    def sample(self, calls: int) -> float:
        self.counts.append(calls)
        time.sleep(0.001)
        return 0.002 * calls * (3 if len(self.counts) in self._disturbed else 1)


@pytest.mark.parametrize("disturbed", [(), (1,), (2, 3), (1, 3, 4, 5, 7)])
def test_a_peak_is_the_best_of_samples_that_are_long_enough(disturbed: tuple[int, ...]) -> None:
    calls = Disturbed(*disturbed)
    trial = torch_peaks.Trial(calls.sample, 0.008)
    found = [trial.go_on(0.02) for _ in range(3)][-1]
    assert found == pytest.approx(0.002)
    assert calls.counts[-1] * 0.002 >= 0.008


def test_a_trial_takes_a_sample_of_enough_calls_however_little_time_it_has() -> None:
    calls = Disturbed()
    torch_peaks.Trial(calls.sample, 0.05).go_on(0.0)
    assert calls.counts[-1] >= 25


PEAKING = {
    "device": CPU,
    "threads": 2,
    "measured_at": datetime(2026, 1, 1, tzinfo=UTC),
    "torch": "2.13.0",
    "copy_bytes_per_s": 5e9,
    "matmul_flops_per_s": {"float32": 3.0, "int8": 9.0},
    "ways": {"float32": "torch", "int8": "loop"},
}


def test_the_better_of_each_rate_is_kept() -> None:
    first = Peaks(**PEAKING, reads=reads((1, 10.0), (2, 5.0)), reasons={"float16": "no kernel"})
    changes = {
        "matmul_flops_per_s": {"float32": 4.0, "float16": 1.0},
        "ways": {"float32": "loop", "float16": "torch"},
    }
    second = Peaks(
        **PEAKING | changes, reads=reads((1, 8.0), (2, 6.0), (4, 3.0)), reasons={"int8": "no kernel"}
    )
    better = first.with_better(second)
    assert better.reads == reads((1, 10.0), (2, 6.0), (4, 3.0))
    assert better.matmul_flops_per_s == {"float32": 4.0, "int8": 9.0, "float16": 1.0}
    assert better.ways == {"float32": "loop", "int8": "loop", "float16": "torch"}
    assert better.reasons == {}


def reads(*rates: tuple[int, float]) -> tuple[ReadRate, ...]:
    return tuple(ReadRate(array_bytes=size, bytes_per_s=rate) for size, rate in rates)


def test_peaks_that_a_variant_surpasses_are_measured_once_more(cache_dir: Path, tmp_path: Path) -> None:
    """The child's peaks are 10^9 at first and double with each measurement."""
    log = tmp_path / "asked"
    peaks = MachinePeaks(probe(), CPU, 2, progress(), program=program("peaking", log))
    preparation = Preparation(peaks)

    def headroom(tflops: float) -> float | None:
        metrics = {"tflops": metric("tflops", tflops)}
        found = preparation.roofline(Matmul(sizes=(512,), dtypes=("float32",)), metrics, RunFacts(), None)
        return found.metrics["headroom"].value

    def times() -> int:
        return len(log.read_text().splitlines())

    assert headroom(0.5e-3) == pytest.approx(2)
    assert times() == 1
    assert headroom(1.2e-3) == pytest.approx(2 / 1.2)
    assert times() == 2
    assert headroom(2.02e-3) == pytest.approx(2 / 2.02)
    assert headroom(3e-3) is None
    assert times() == 2, "it was measured for every variant"
    assert Peaks.model_validate_json(kept(cache_dir).read_text()) == peaks.known


def test_a_second_look_that_fails_leaves_what_is_known(tmp_path: Path) -> None:
    first = MachinePeaks(probe(), CPU, 2, progress(), program=program("peaking", tmp_path / "asked")).known
    for reason, child in ((None, "dying"), ("enough", "hanging")):
        peaks = MachinePeaks(probe(), CPU, 2, progress(reason), program=program(child))
        assert peaks.better() is None
        assert peaks.known == first


class TestLoops:
    """The loops of ops/rates read, copy and multiply what they say."""

    @pytest.fixture
    def loops(self) -> RateLoops:
        return RateLoops(threads=2)

    def test_a_copy_is_a_copy(self, loops: RateLoops) -> None:
        import torch

        source, target = torch.arange(12_800, dtype=torch.float32), torch.zeros(12_800)
        for way in WAYS:
            target.zero_()
            assert loops.copy_s(target, source, 1, way) > 0
            assert torch.equal(target, source)

    def test_more_work_takes_longer(self, loops: RateLoops) -> None:
        """A loop that the compiler has left out would not; thirty times the work, for a busy machine's sake."""
        import torch

        array = torch.ones(2**20)
        for way in WAYS:
            few, many = (min(loops.read_s(array, n, way) for _ in range(5)) for n in (1, 30))
            assert many > 2 * few
        for name in PRODUCTS:
            if loops.operations(name):
                few, many = (min(loops.multiply_s(name, n) for _ in range(5)) for n in (2000, 60_000))
                assert many > 2 * few

    def test_every_cpu_multiplies_floats_and_a_round_is_of_all_threads(self, loops: RateLoops) -> None:
        assert loops.operations("float32 loop") == 2 * RateLoops(threads=1).operations("float32 loop") > 0

    @pytest.mark.parametrize("bytes_", [1000, 1023, 1025])
    def test_an_array_that_is_no_multiple_of_a_slice_is_refused(self, loops: RateLoops, bytes_: int) -> None:
        import torch

        with pytest.raises(ValueError, match="multiple of 1024"):
            loops.read_s(torch.zeros(bytes_, dtype=torch.uint8), 1, "plain")


@pytest.mark.gpu
def test_a_gpu_is_measured_in_all_its_dtypes() -> None:
    found = torch_peaks.measured_peaks(DeviceKind.CUDA, 1)
    assert found.copy_bytes_per_s > 0
    rates = found.matmul_flops_per_s
    assert {*rates, *found.reasons} == set(torch_peaks.DTYPES[DeviceKind.CUDA])
    assert {"float32", "float16"} <= set(rates)
