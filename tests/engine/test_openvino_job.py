"""Jobs of openvino beside torch, from the request to the results."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.result import Result, VerdictReason
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.vocabulary import VariantStatus
from tests.engine.converted_engines import own_cache

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]
NAMES = ("openvino_int8", "openvino_int4")
PACKAGES = ("openvino", "nncf")
QUICK = {
    "replicates": 1,
    "min_seconds": 0.01,
    "max_seconds": 1,
    "meters": ["latency", "memory", "quality"],
    "quality": {"tokens": 200},
}
GENERATE = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 16}
LARGEST_KLD = {"openvino_int8": 0.02, "openvino_int4": 0.5}


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        yield from own_cache(tmp_path_factory.mktemp("engines"))


def job(**changes: Any) -> JobSpec:
    document = {"workload": GENERATE, "model": "bundled:tiny", "measure": QUICK}
    return JobSpec.model_validate(document | {"limits": {"wait_for_quiet_s": 0}} | changes)


def measured(spec: JobSpec, lock_dir: Path) -> Report:
    """With one thread: beside other tests, two that wait for each other take many times as long."""
    return run(spec, lambda _: None, lock_dir=lock_dir, threads=1)


def value(result: Result, metric: str) -> float:
    found = result.metrics[metric].value
    assert found is not None, result.metrics[metric].reason
    return found


@pytest.mark.openvino
def test_it_is_measured_beside_torch(tmp_path: Path) -> None:
    beside: list[dict[str, Any]] = [{"backend": "openvino", "label": "plain"}]
    beside += [{"backend": "openvino", "stack": [{"name": name}], "label": name} for name in NAMES]
    report = measured(job(beside=beside), tmp_path)
    assert [outcome.reason for outcome in report.outcomes] == [None] * len(report.outcomes)
    results = {result.variant.label: result for result in report.results}
    assert list(results) == ["baseline", "plain", *NAMES]
    assert len({result.variant.workload_digest for result in results.values()}) == 1
    for result in results.values():
        wrong = {VerdictReason.OUTPUT_INVALID, VerdictReason.NOT_THE_MODEL}
        assert wrong.isdisjoint(result.verdict.reasons)
        assert value(result, "tokens_per_s") > 0
        assert value(result, "host_peak_bytes") > 0
        assert result.facts.footprint is not None
    assert len({result.facts.weights.hash for result in results.values() if result.facts.weights}) == 1
    assert value(results["plain"], "kld_mean") < 1e-6
    assert value(results["plain"], "top1_agreement") == 1
    for name in NAMES:
        assert 0 < value(results[name], "kld_mean") < LARGEST_KLD[name]
        assert value(results[name], "weight_bytes") < value(results["plain"], "weight_bytes") / 3


@pytest.mark.long
@pytest.mark.openvino
def test_a_batch_is_a_job(tmp_path: Path) -> None:
    measure = QUICK | {"meters": ["latency"]}
    spec = job(
        backend="openvino",
        model="preset:tiny-llama-test",
        stack=[{"name": "openvino_int8"}],
        measure=measure,
        workload=GENERATE | {"batch_size": 2},
    )
    (result,) = measured(spec, tmp_path).results
    assert value(result, "ttft_s") > 0
    assert value(result, "tpot_s") > 0


@pytest.mark.long
@pytest.mark.openvino
def test_quality_by_itself_is_a_job(tmp_path: Path) -> None:
    spec = job(backend="openvino", workload={"kind": "quality", "window": 32})
    (result,) = measured(spec, tmp_path).results
    assert value(result, "scored_tokens_per_s") > 0
    assert value(result, "kld_mean") < 1e-6


def test_without_its_packages_the_variant_says_the_command_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = probe()
    software = {name: found for name, found in whole.software.items() if name not in PACKAGES}
    bare = whole.model_copy(update={"software": software})
    monkeypatch.setattr("optigpu.conductor.session.probe", lambda: bare)
    measure = QUICK | {"meters": ["latency"]}
    spec = job(beside=[{"backend": "openvino"}], measure=measure, model="preset:tiny-llama-test")
    torch, other = measured(spec, tmp_path).outcomes
    assert torch.status is VariantStatus.SUCCEEDED
    assert other.status is VariantStatus.UNSUPPORTED
    assert 'pip install -e ".[openvino]"' in str(other.reason)


@pytest.mark.openvino
def test_its_measuring_process_loads_no_torch_and_no_network_client(tmp_path: Path) -> None:
    """Once the model is kept; writing one is another process's affair."""
    program = f"""
import sys
from pathlib import Path
from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate

folder = Path({str(tmp_path)!r})
order = Order("bundled:tiny", (), Generate(), DeviceKind.CPU, 0, 1, folder, probe())
runtime = BACKENDS["openvino"].prepare(order, lambda _: None)
request = Generate(prompt_tokens=4, new_tokens=4).prepare(runtime)
assert request.run()["tokens_per_s"] > 0
assert runtime.weights().hash
print(sorted(name for name in ("torch", "transformers", "openvino_telemetry") if sys.modules.get(name)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
