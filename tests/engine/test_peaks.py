"""The machine's own peaks: measured by a separate process, kept for a day; no real job is faster than its roof."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch import peak_rates as torch_peaks
from optigpu.conductor.preparation import MachinePeaks, Preparation
from optigpu.conductor.processes.child import TASKS
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.session import environment_for
from optigpu.documents.facts import RunFacts
from optigpu.documents.peaks import Peaks, ReadRate
from optigpu.documents.result import Environment, Result
from optigpu.hardware import probe
from optigpu.hardware.cpu import cpu_cores
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.ops.rates.rates import WAYS, RateLoops
from optigpu.vocabulary import CancelledError, DeviceKind
from optigpu.workloads.matmul import Matmul
from tests.engine.caches import OPERATORS, cache_with
from tests.engine.processes import program
from tests.unit.made_results import metric

pytestmark = pytest.mark.slow

CPU = DeviceKind.CPU


@pytest.fixture
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


@pytest.mark.usefixtures("cache_dir")
def test_a_day_later_it_is_measured_again(cache_dir: Path, asked: Any) -> None:
    assert asked() == asked()
    assert asked.times() == 1
    for moment in (datetime.now(UTC) - timedelta(days=1), datetime.now(UTC) + timedelta(hours=1)):
        document = json.loads(kept(cache_dir).read_text()) | {"measured_at": moment.isoformat()}
        kept(cache_dir).write_text(json.dumps(document))
        before = asked.times()
        assert asked().measured_at != moment
        assert asked.times() == before + 1


@pytest.mark.usefixtures("cache_dir")
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"kind": "peaks", "reads": []}'], ids=repr)
def test_what_is_no_record_of_peaks_is_measured_again(cache_dir: Path, asked: Any, content: bytes) -> None:
    first = asked()
    kept(cache_dir).write_bytes(content)
    assert asked() != first
    assert asked.times() == 2


@pytest.mark.usefixtures("cache_dir")
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


@pytest.mark.usefixtures("cache_dir")
@pytest.mark.parametrize("child", [("dying", "3", "0"), ("garbage", "text")])
def test_a_process_that_fails_leaves_none_and_the_reason_in_the_log(
    cache_dir: Path, caplog: pytest.LogCaptureFixture, child: tuple[str, ...]
) -> None:
    with caplog.at_level(logging.WARNING):
        assert MachinePeaks(probe(), CPU, 2, progress(), program=program(*child)).known is None
    assert "peak rates could not be measured" in caplog.text
    assert not (cache_dir / "peaks").exists()


@pytest.mark.usefixtures("cache_dir")
def test_a_job_that_is_cancelled_meanwhile_ends_at_once() -> None:
    with pytest.raises(CancelledError, match="enough"):
        _ = MachinePeaks(probe(), CPU, 2, progress("enough"), program=program("hanging")).known


class Disturbed:
    """Calls that take 2 ms each, and those of some samples three times as long."""

    def __init__(self, *disturbed: int) -> None:
        self.counts: list[int] = []
        self._disturbed = disturbed

    def sample(self, calls: int) -> float:
        self.counts.append(calls)
        time.sleep(0.001)
        return 0.002 * calls * (3 if len(self.counts) in self._disturbed else 1)


@pytest.mark.usefixtures("cache_dir")
@pytest.mark.parametrize("disturbed", [(), (1,), (2, 3), (1, 3, 4, 5, 7)])
def test_a_peak_is_the_best_of_samples_that_are_long_enough(disturbed: tuple[int, ...]) -> None:
    calls = Disturbed(*disturbed)
    trial = torch_peaks.Trial(calls.sample, 0.008)
    found = [trial.go_on(0.02) for _ in range(3)][-1]
    assert found == pytest.approx(0.002)
    assert calls.counts[-1] * 0.002 >= 0.008


PEAKING = {
    "device": CPU,
    "threads": 2,
    "measured_at": datetime(2026, 1, 1, tzinfo=UTC),
    "torch": "2.13.0",
    "copy_bytes_per_s": 5e9,
    "matmul_flops_per_s": {"float32": 3.0, "int8": 9.0},
    "ways": {"float32": "torch", "int8": "loop"},
}


@pytest.mark.usefixtures("cache_dir")
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


@pytest.mark.usefixtures("cache_dir")
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


@pytest.mark.usefixtures("cache_dir")
@pytest.mark.gpu
def test_a_gpu_is_measured_in_all_its_dtypes() -> None:
    found = torch_peaks.measured_peaks(DeviceKind.CUDA, 1)
    assert found.copy_bytes_per_s > 0
    rates = found.matmul_flops_per_s
    assert {*rates, *found.reasons} == set(torch_peaks.DTYPES[DeviceKind.CUDA])
    assert {"float32", "float16"} <= set(rates)


THREADS = cpu_cores()
QUICK = {"replicates": 1, "min_seconds": 0.5, "max_seconds": 5, "meters": ["latency"]}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of all jobs here, so that the peaks are measured once."""
    folder = cache_with(tmp_path_factory.mktemp("roof"), OPERATORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        yield folder


def measured(tmp_path: Path, **spec: Any) -> tuple[Result, ...]:
    rest = {"device": "cpu", "measure": QUICK, "limits": {"wait_for_quiet_s": 0}}
    whole = JobSpec.model_validate(rest | spec)
    return run(whole, lambda _: None, lock_dir=tmp_path, threads=THREADS).results


def holds(result: Result) -> bool:
    headroom = result.metrics["headroom"]
    assert headroom.value is not None, headroom.reason
    return headroom.value >= 0.95


@pytest.mark.long
@pytest.mark.usefixtures("forked_children")
def test_a_real_process_measures_this_machine(cache: Path) -> None:
    def peaks(program: Sequence[str] = TASKS) -> MachinePeaks:
        cpu, progress = DeviceKind.CPU, JobProgress(lambda _: None, lambda: None, [0], 1)
        return MachinePeaks(environment_for(cpu), cpu, THREADS, progress, program=program)

    found = peaks().known
    assert found is not None
    sizes = [read.array_bytes for read in found.reads]
    assert sizes == sorted(set(sizes)) == [copy.array_bytes for copy in found.copies]
    assert sizes[0] == THREADS * torch_peaks.SMALLEST_THREAD_BYTES
    assert sizes[-1] >= torch_peaks.LEAST_LARGEST_ARRAY_BYTES
    assert found.copy_bytes_per_s == found.copies[-1].bytes_per_s
    rates = found.matmul_flops_per_s
    assert {*rates, *found.reasons} == set(torch_peaks.DTYPES[DeviceKind.CPU])
    assert set(found.ways) == set(rates)
    assert all(rates[narrow] >= rates["float32"] for narrow in torch_peaks.NARROW if narrow in rates)
    (file,) = (cache / "peaks").iterdir()
    assert Peaks.model_validate_json(file.read_text()) == found
    assert peaks((sys.executable, "-c", "raise SystemExit(1)")).known == found, "it was measured again"


@pytest.mark.usefixtures("forked_children")
@pytest.mark.long
@pytest.mark.usefixtures("cache")
def test_int8_products_in_a_cache_stay_below_the_roof_of_int8_products_in_a_cache(tmp_path: Path) -> None:
    """Held against float32 products, this one ran 1.3 times as fast as its roof."""
    workload = {"kind": "generate", "prompt_tokens": 16, "new_tokens": 32}
    stack = [{"name": "native_decode", "weights": "w4", "calibration": "none", "tokens_at_once": 31}]
    (result,) = measured(tmp_path, workload=workload, model="bundled:tiny", stack=stack)
    roofline = result.facts.roofline
    assert roofline is not None
    assert roofline.step is not None
    assert roofline.peaks is not None
    assert roofline.dtype == "int8"
    assert roofline.step.roof.array_bytes is not None
    assert roofline.step.roof.array_bytes < 2**25, "two megabytes were held against an array in memory"
    assert holds(result)
