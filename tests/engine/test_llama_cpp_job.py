"""Jobs of llama.cpp from the request to the results: beside torch, by itself, and where it is not installed."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.llama_cpp import INSTALL
from optigpu.documents.facts import TextQuality
from optigpu.documents.result import Environment, Result, VerdictReason
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.models.held import MODELS_DIR
from optigpu.models.reference import BUNDLED
from optigpu.paths import cache_dir
from optigpu.vocabulary import VariantStatus
from tests.engine.caches import BUILDS, CONVERTED, OPERATORS, PEAKS, cache_with
from tests.engine.converted_engines import loaded_by_measuring, prepared

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

QUICK = {
    "replicates": 1,
    "min_seconds": 0.01,
    "max_seconds": 1,
    "meters": ["latency", "memory", "quality"],
    "quality": {"tokens": 200},
}
GENERATE = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 16}
TYPES = ("F16", "Q8_0", "Q4_0")
WEIGHTS = hashlib.sha256((BUNDLED["tiny"] / "model.safetensors").read_bytes()).hexdigest()


def job(**changes: Any) -> JobSpec:
    document = {"workload": GENERATE, "model": "bundled:tiny", "measure": QUICK}
    document |= {"limits": {"wait_for_quiet_s": 0}}
    return JobSpec.model_validate(document | changes)


def measured(spec: JobSpec, lock_dir: Path) -> Report:
    """With one thread: beside other tests, two that wait for each other take many times as long."""
    return run(spec, lambda _: None, lock_dir=lock_dir, threads=1)


def gguf(kind: str) -> list[dict[str, str]]:
    return [{"name": "gguf", "type": kind}]


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every child inherits the variables."""
    with pytest.MonkeyPatch.context() as patch:
        folder = cache_with(tmp_path_factory.mktemp("llama"), BUILDS, OPERATORS, PEAKS, CONVERTED)
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        patch.setenv("OPTIGPU_DATA_DIR", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """torch's baseline with llama.cpp's, and with files of three types, beside it."""
    beside: list[dict[str, Any]] = [{"backend": "llama_cpp"}]
    beside += [{"backend": "llama_cpp", "stack": gguf(kind), "label": kind} for kind in TYPES]
    return measured(job(beside=beside), tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="module")
def results(report: Report) -> dict[str, Result]:
    assert [outcome.reason for outcome in report.outcomes] == [None] * 5
    return {result.variant.label: result for result in report.results}


def value(result: Result, metric: str) -> float:
    found = result.metrics[metric].value
    assert found is not None, result.metrics[metric].reason
    return found


@pytest.mark.llama
def test_engines_are_measured_side_by_side_and_compare(report: Report, results: dict[str, Result]) -> None:
    assert list(results) == ["baseline", "llama_cpp: baseline", *TYPES]
    assert {result.variant.backend for result in results.values()} == {"torch", "llama_cpp"}
    assert all(result.facts.side_by_side == (0, 1, 2, 3, 4) for result in results.values())
    assert len({result.variant.workload_digest for result in results.values()}) == 1
    assert len({result.variant.variant_digest for result in results.values()}) == 5
    assert [row.label for row in report.attribution.rows] == list(results)


@pytest.mark.llama
def test_its_results_are_whole(results: dict[str, Result]) -> None:
    for result in results.values():
        wrong = {VerdictReason.OUTPUT_INVALID, VerdictReason.NOT_THE_MODEL}
        assert wrong.isdisjoint(result.verdict.reasons)
        assert value(result, "tokens_per_s") > 0
        assert value(result, "host_peak_bytes") > 0
        weights = result.facts.weights
        assert weights is not None
        assert (weights.hash, weights.hash_of) == (WEIGHTS, "files")
        assert result.provenance is not None
        assert result.provenance.weight_hash == WEIGHTS
        assert result.metrics["peak_bytes"].value is None
        assert result.metrics["peak_bytes"].reason
    four = results["Q4_0"].facts
    assert four.recorded["gguf_type"] == "Q4_0"
    assert four.versions["llama-cpp-python"]
    assert four.attention_kernels is None
    assert "llama.cpp" in four.why_null("attention_kernels")
    assert four.footprint is not None


@pytest.mark.llama
def test_fewer_bits_are_fewer_bytes(results: dict[str, Result]) -> None:
    sizes = [value(results[name], "weight_bytes") for name in ("llama_cpp: baseline", *TYPES)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 5 * sizes[-1]
    assert len({value(result, "params_total") for result in results.values()}) == 1


@pytest.mark.llama
def test_fewer_bits_are_further_from_fp32(results: dict[str, Result]) -> None:
    losses = [value(results[name], "kld_mean") for name in ("llama_cpp: baseline", *TYPES)]
    assert losses == sorted(losses)
    assert losses[0] < 1e-7
    assert losses[1] < 1e-4 < losses[3]
    assert losses[2] < losses[3] / 3
    assert value(results["llama_cpp: baseline"], "top1_agreement") == 1
    texts = [result.facts.quality for result in results.values()]
    assert all(isinstance(text, TextQuality) for text in texts)
    assert len({text.tokens_sha256 for text in texts if isinstance(text, TextQuality)}) == 1


@pytest.mark.long
@pytest.mark.llama
def test_a_ladder_of_its_own_has_its_baseline(tmp_path: Path) -> None:
    measure = QUICK | {"meters": ["latency"]}
    spec = job(
        backend="llama_cpp",
        model="preset:tiny-gpt2-test",
        plan="ladder",
        stack=gguf("Q8_0"),
        measure=measure,
        workload=GENERATE | {"batch_size": 2},
    )
    found = measured(spec, tmp_path)
    assert [row.label for row in found.attribution.rows] == ["llama_cpp: baseline", "llama_cpp: gguf"]
    assert all(result.variant.backend == "llama_cpp" for result in found.results)
    assert all(result.facts.weights and result.facts.weights.hash_of == "recipe" for result in found.results)


@pytest.mark.llama
def test_quality_by_itself_is_a_job(tmp_path: Path) -> None:
    spec = job(backend="llama_cpp", stack=gguf("Q4_0"), workload={"kind": "quality", "window": 32})
    (result,) = measured(spec, tmp_path).results
    assert value(result, "scored_tokens_per_s") > 0
    assert value(result, "kld_mean") > 1e-4


@pytest.mark.llama
def test_a_family_that_is_not_written_ends_its_variant_alone(tmp_path: Path) -> None:
    """The sentences for other models are in test_llama_cpp_backend.py."""
    measure = QUICK | {"meters": ["latency"]}
    report = measured(job(backend="llama_cpp", model="preset:tiny-qwen-test", measure=measure), tmp_path)
    (outcome,) = report.outcomes
    assert outcome.status is VariantStatus.UNSUPPORTED
    assert "qwen2 models" in str(outcome.reason)


@pytest.mark.llama
def test_a_file_of_another_architecture_ends_its_variant_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a file that runs, in one job. The sentences for other files are in test_llama_cpp_types.py."""
    prepared("llama_cpp", tmp_path)
    kept = max((cache_dir() / "converted" / "gguf").glob("bundled-tiny-*-F32.gguf"), key=modified_ns)
    content = kept.read_bytes()
    (tmp_path / "good.gguf").write_bytes(content)
    (tmp_path / "other.gguf").write_bytes(content.replace(b"gpt2", b"bert"))
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    spec = job(
        backend="llama_cpp",
        model=None,
        models=["path:other.gguf", "path:good.gguf"],
        measure=QUICK | {"meters": ["latency"]},
    )
    other, good = measured(spec, tmp_path / "locks").outcomes
    assert other.status is VariantStatus.UNSUPPORTED
    assert "'bert', and those known here are gpt2, llama" in str(other.reason)
    assert good.status is VariantStatus.SUCCEEDED


@pytest.mark.long
@pytest.mark.llama
def test_a_kept_file_that_the_engine_aborts_on_is_written_anew_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no blocks it passes all checks of the header, and llama.cpp ends its process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path, BUILDS, OPERATORS, PEAKS).parent))
    prepared("llama_cpp", tmp_path, model="preset:tiny-llama-test")
    (kept,) = (cache_dir() / "converted" / "gguf").glob("preset-tiny-llama-test-*-F32.gguf")
    whole = kept.read_bytes()
    count = whole.index(b"llama.block_count") + len(b"llama.block_count") + 4
    kept.write_bytes(whole[:count] + bytes(4) + whole[count + 4 :])
    spec = job(backend="llama_cpp", model="preset:tiny-llama-test", measure=QUICK | {"meters": ["latency"]})
    (damaged,) = measured(spec, tmp_path / "locks").outcomes
    assert damaged.status is VariantStatus.FAILED
    said = f"The engine crashed on {kept.name}, a kept conversion that may be damaged. It has been removed; run the job"
    assert str(damaged.reason).startswith(f"{said} again. The measuring process was killed by signal 6")
    assert "GGML_ASSERT" in str(damaged.reason)
    assert "ggml_print_backtrace" not in str(damaged.reason)
    (again,) = measured(spec, tmp_path / "locks").outcomes
    assert again.status is VariantStatus.SUCCEEDED
    assert kept.read_bytes() == whole


def modified_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def test_without_its_packages_the_variant_says_the_command_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = _without_llama_cpp(probe())
    monkeypatch.setattr("optigpu.conductor.session.probe", lambda: bare)
    measure = QUICK | {"meters": ["latency"]}
    beside = [{"backend": "llama_cpp", "stack": gguf("Q4_0")}]
    spec = job(beside=beside, measure=measure, model="preset:tiny-llama-test")
    torch, llama_cpp = measured(spec, tmp_path).outcomes
    assert torch.status is VariantStatus.SUCCEEDED
    assert llama_cpp.status is VariantStatus.UNSUPPORTED
    assert str(llama_cpp.reason).endswith(f"with: {INSTALL}")


def _without_llama_cpp(environment: Environment) -> Environment:
    software = {
        name: found
        for name, found in environment.software.items()
        if name not in ("gguf", "llama-cpp-python")
    }
    return environment.model_copy(update={"software": software})


@pytest.mark.llama
def test_its_measuring_process_loads_no_torch(report: Report, tmp_path: Path) -> None:
    """The file is kept already; writing one is another process's affair."""
    assert loaded_by_measuring("llama_cpp", tmp_path, "torch", "transformers") == "[]"
