"""Jobs that measure ONNX Runtime beside torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.facts import TextQuality
from optigpu.documents.result import Result, VerdictReason
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.vocabulary import VariantStatus
from tests.engine.caches import BUILDS, CONVERTED, OPERATORS, PEAKS, cache_with
from tests.engine.converted_engines import loaded_by_measuring

pytestmark = [pytest.mark.slow, pytest.mark.onnxruntime, pytest.mark.usefixtures("forked_children")]

QUICK = {
    "replicates": 1,
    "min_seconds": 0.01,
    "max_seconds": 1,
    "meters": ["latency", "memory", "quality"],
    "quality": {"tokens": 200},
}
GENERATE = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 16}
LABELS = ["baseline", "onnxruntime: baseline", "onnxruntime: onnx_int8", "onnxruntime: onnx_int4"]


def job(**changes: Any) -> JobSpec:
    document = {"workload": GENERATE, "model": "bundled:tiny", "measure": QUICK}
    document |= {"limits": {"wait_for_quiet_s": 0}}
    return JobSpec.model_validate(document | changes)


def measured(spec: JobSpec, lock_dir: Path) -> Report:
    """With one thread: beside other tests, two that wait for each other take many times as long."""
    return run(spec, lambda _: None, lock_dir=lock_dir, threads=1)


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every child inherits the variables."""
    with pytest.MonkeyPatch.context() as patch:
        folder = cache_with(tmp_path_factory.mktemp("onnx"), BUILDS, OPERATORS, PEAKS, CONVERTED)
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        patch.setenv("OPTIGPU_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """torch's baseline with ONNX Runtime's, and with 8 and 4 bits, beside it."""
    beside: list[dict[str, Any]] = [{"backend": "onnxruntime"}]
    beside += [{"backend": "onnxruntime", "stack": [{"name": name}]} for name in ("onnx_int8", "onnx_int4")]
    return measured(job(beside=beside), tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="module")
def results(report: Report) -> dict[str, Result]:
    assert [outcome.reason for outcome in report.outcomes] == [None] * len(LABELS)
    return {result.variant.label: result for result in report.results}


def value(result: Result, metric: str) -> float:
    found = result.metrics[metric].value
    assert found is not None, result.metrics[metric].reason
    return found


def test_engines_are_measured_side_by_side_and_compare(report: Report, results: dict[str, Result]) -> None:
    assert list(results) == LABELS
    assert {result.variant.backend for result in results.values()} == {"torch", "onnxruntime"}
    assert len({result.variant.workload_digest for result in results.values()}) == 1
    assert len({result.variant.variant_digest for result in results.values()}) == len(LABELS)
    assert [row.label for row in report.attribution.rows] == LABELS


def test_its_results_are_whole(results: dict[str, Result]) -> None:
    hashes = {result.facts.weights.hash for result in results.values() if result.facts.weights}
    assert len(hashes) == 1
    for result in results.values():
        wrong = {VerdictReason.OUTPUT_INVALID, VerdictReason.NOT_THE_MODEL}
        assert wrong.isdisjoint(result.verdict.reasons)
        assert value(result, "tokens_per_s") > 0
        assert value(result, "host_peak_bytes") > 0
    four = results[LABELS[3]].facts
    assert four.versions["onnxruntime"]
    assert four.recorded["onnx_tensor_types"]
    assert "ONNX Runtime" in four.why_null("attention_kernels")
    assert four.footprint is not None
    assert four.kv_cache == "past_present_share_buffer"


def test_fewer_bits_are_fewer_bytes_and_further_from_fp32(results: dict[str, Result]) -> None:
    own = [results[label] for label in LABELS[1:]]
    sizes = [value(result, "weight_bytes") for result in own]
    assert sizes == sorted(sizes, reverse=True)
    losses = [value(result, "kld_mean") for result in own]
    assert losses == sorted(losses)
    assert losses[0] < 1e-7
    assert losses[1] < 1e-3 < losses[2] < 0.2
    assert value(own[0], "top1_agreement") == 1
    texts = [result.facts.quality for result in results.values()]
    assert len({text.tokens_sha256 for text in texts if isinstance(text, TextQuality)}) == 1


@pytest.mark.parametrize(
    ("workload", "metric"),
    [
        ({"kind": "prefill", "prompt_tokens": 16, "batch_size": 2}, "prefill_tokens_per_s"),
        ({"kind": "quality", "window": 32}, "scored_tokens_per_s"),
    ],
)
def test_other_workloads_of_text_are_jobs(tmp_path: Path, workload: dict[str, Any], metric: str) -> None:
    spec = job(backend="onnxruntime", stack=[{"name": "onnx_int4"}], workload=workload)
    (result,) = measured(spec, tmp_path).results
    assert value(result, metric) > 0


@pytest.mark.long
def test_classifying_is_a_job_with_quality(tmp_path: Path) -> None:
    model, workload = "preset:tiny-resnet-test", {"kind": "classify", "batch_size": 2}
    beside = [{"backend": "onnxruntime"}, {"backend": "onnxruntime", "stack": [{"name": "onnx_graph"}]}]
    report = measured(job(model=model, workload=workload, beside=beside, measure=QUICK), tmp_path)
    assert [outcome.reason for outcome in report.outcomes] == [None] * 3
    for result in report.results:
        assert value(result, "images_per_s") > 0
    assert {result.facts.network for result in report.results if result.facts.network} != set()


def test_a_family_that_is_not_written_ends_its_variant_alone(tmp_path: Path) -> None:
    measure = QUICK | {"meters": ["latency"]}
    report = measured(job(backend="onnxruntime", model="preset:gpt-j-6b", measure=measure), tmp_path)
    (outcome,) = report.outcomes
    assert outcome.status is VariantStatus.UNSUPPORTED
    assert "gptj models" in str(outcome.reason)


def test_its_measuring_process_loads_no_torch(report: Report, tmp_path: Path) -> None:
    """The model is kept already; writing one is another process's affair."""
    assert loaded_by_measuring("onnxruntime", tmp_path, "torch", "transformers", "onnx") == "[]"
