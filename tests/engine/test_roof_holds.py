"""Real peaks of this machine, and real jobs under them: none is faster than the roof that it is held against."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch import peak_rates as torch_peaks
from optigpu.conductor.peak_cache import PEAKS, MachinePeaks
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.session import environment_for
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Result
from optigpu.hardware.cpu import cpu_cores
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.vocabulary import DeviceKind
from tests.engine.caches import OPERATORS, cache_with

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

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


def test_a_real_process_measures_this_machine(cache: Path) -> None:
    def peaks(program: Sequence[str] = PEAKS) -> MachinePeaks:
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


@pytest.mark.long
@pytest.mark.usefixtures("cache")
def test_int8_products_in_a_cache_stay_below_the_roof_of_int8_products_in_a_cache(tmp_path: Path) -> None:
    """Held against float32 products, this one ran 1.3 times as fast as its roof."""
    workload = {"kind": "generate", "prompt_tokens": 16, "new_tokens": 32}
    stack = [{"name": "native_decode", "calibration": "none", "tokens_at_once": 31}]
    (result,) = measured(tmp_path, workload=workload, model="bundled:tiny", stack=stack)
    roofline = result.facts.roofline
    assert roofline is not None
    assert roofline.step is not None
    assert roofline.peaks is not None
    assert roofline.dtype == "int8"
    assert roofline.step.roof.array_bytes is not None
    assert roofline.step.roof.array_bytes < 2**25, "two megabytes were held against an array in memory"
    assert holds(result)


@pytest.mark.long
@pytest.mark.usefixtures("cache")
def test_a_matrix_product_stays_below_the_roof_of_products(tmp_path: Path) -> None:
    for result in measured(tmp_path, workload={"kind": "matmul", "sizes": [512], "dtypes": ["float32"]}):
        assert holds(result)
