"""The litert backend: scores as numpy and LiteRT's reference kernels have them, facts, what it refuses, whole jobs."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from optigpu.backends import BACKENDS
from optigpu.backends.litert import INSTALL
from optigpu.documents.facts import NetworkFacts
from optigpu.documents.result import Result, VerdictReason
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import run
from optigpu.models.held import held_models
from optigpu.models.loading.load import MODELS_DIR
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError, VariantStatus
from optigpu.workloads.classify import Classify
from tests.engine import converted_engines
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, cache_with
from tests.engine.tflite_models import (
    CLASSES,
    IMAGE_SCALE,
    SCORE_SCALE,
    SIDE,
    TinyWeights,
    write_classifier,
    write_manifest,
)

pytestmark = pytest.mark.usefixtures("forked_children")

BACKEND = BACKENDS["litert"]
FLOAT, INT8 = "path:edge/float.tflite", "path:edge/int8/model.tflite"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model directory with a float file, and an int8 file with its manifest; OPTIGPU_MODELS_DIR names it."""
    made = tmp_path_factory.mktemp("tflite")
    write_classifier(made / "edge" / "float.tflite", quantized=False)
    write_classifier(made / "edge" / "int8" / "model.tflite", quantized=True)
    write_manifest(made / "edge" / "int8" / "model.tflite")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(made))
        yield made


def prepared(model: str, batch: int = 1, threads: int = 1) -> Any:
    workload = Classify(batch_size=batch)
    return converted_engines.prepared(
        "litert", Path("unused"), model=model, workload=workload, threads=threads
    )


def images(batch: int = 1) -> Any:
    """Multiples of the int8 input's step, so that quantizing them loses nothing."""
    drawn = np.random.default_rng(3).integers(-100, 100, (batch, 3, SIDE, SIDE))
    return np.asarray(drawn * IMAGE_SCALE, np.float32)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> TinyWeights:
    return write_classifier(tmp_path_factory.mktemp("again") / "m.tflite", quantized=False)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_float_file_gives_the_scores_of_numpy(folder: Path, weights: TinyWeights, batch: int) -> None:
    given = images(batch)
    done = prepared(FLOAT, batch).forward(given)
    expected = weights.scores(given)
    np.testing.assert_allclose(done.logits, expected, rtol=1e-4, atol=1e-4)
    assert done.chosen.tolist() == expected.argmax(axis=1).tolist()
    assert done.seconds > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_an_int8_file_gives_the_scores_of_the_reference_kernels(folder: Path, batch: int) -> None:
    given = images(batch)
    done = prepared(INT8, batch).forward(given)
    reference = Interpreter(
        model_path=str(folder / "edge" / "int8" / "model.tflite"),
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
    )
    reference.allocate_tensors()
    for image, logits in zip(given, done.logits, strict=True):
        stored = np.rint(image.transpose(1, 2, 0)[None] / IMAGE_SCALE).astype(np.int8)
        reference.set_tensor(reference.get_input_details()[0]["index"], stored)
        reference.invoke()
        expected = reference.get_tensor(reference.get_output_details()[0]["index"])[0]
        assert len(set(expected.tolist())) > CLASSES // 2, "scores that are all alike compare nothing"
        assert np.abs(logits / SCORE_SCALE - expected).max() <= 1
    assert done.logits.dtype == np.float32
    assert done.chosen.tolist() == done.logits.argmax(axis=1).tolist()


def test_what_is_beyond_int8_becomes_its_largest_number(folder: Path) -> None:
    runtime = prepared(INT8)
    largest = np.full((1, 3, SIDE, SIDE), 127 * IMAGE_SCALE, np.float32)
    np.testing.assert_array_equal(runtime.forward(largest * 50).logits, runtime.forward(largest).logits)


def test_the_request_of_classify_is_checked_and_repeated(folder: Path) -> None:
    runtime = prepared(INT8, batch=2)
    request = Classify(batch_size=2).prepare(runtime)
    assert request.check().problem is None
    assert request.run()["images_per_s"] > 0
    request.observe()
    assert request.fresh(7).check().problem is None


def test_it_says_which_file_and_which_network_ran(folder: Path) -> None:
    content = (folder / "edge" / "int8" / "model.tflite").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    runtime = prepared(INT8, threads=2)
    found = runtime.weights()
    assert (found.hash, found.hash_of, found.files) == (digest, "files", {"model.tflite": digest})
    parameters = 8 * 27 + 8 + 80 + 10
    assert found.parameters == parameters + 2
    assert found.bytes == 8 * 27 + 4 * 8 + 80 + 4 * 10 + 2 * 4
    macs = 16 * 16 * 8 * 27 + 80
    assert runtime.footprint().flops == 2 * macs
    Classify().prepare(runtime)
    facts = runtime.notes.facts
    assert facts["network"] == NetworkFacts(
        family="mobilenet_v2", alpha="0.35", input=(SIDE, SIDE, 3), classes=CLASSES
    )
    assert (facts["dtype"], facts["threads"], facts["tflite_sha256"]) == ("int8", 2, digest)
    assert facts["tflite_operators"] == ["CONV_2D", "FULLY_CONNECTED", "MEAN"]


def test_without_a_manifest_the_network_is_from_a_file(folder: Path) -> None:
    runtime = prepared(FLOAT)
    Classify().prepare(runtime)
    assert runtime.notes.facts["network"] == NetworkFacts(
        family="file", input=(SIDE, SIDE, 3), classes=CLASSES
    )
    assert runtime.notes.facts["dtype"] == "float32"


def test_what_it_does_not_know_has_a_reason(folder: Path) -> None:
    runtime = prepared(FLOAT)
    peaks = runtime.peak_memory(lambda: None)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (None, None)
    assert all("CPU" in reason for reason in peaks.reasons.values())
    with pytest.raises(UnsupportedError, match="no profiler"):
        runtime.profile(lambda: None, 1, Path("trace"))
    with pytest.raises(UnsupportedError, match="operators"):
        BACKEND.peaks(DeviceKind.CPU, 1)
    with runtime.annotate("round"):
        runtime.compute_exactly()
    assert BACKEND.is_out_of_memory(MemoryError())
    assert not BACKEND.is_out_of_memory(ValueError())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "preset:resnet-50",
            "it runs .tflite files, such as `optigpu convert` writes; name one as path:FOLDER",
        ),
        ("hub:org/model", "it runs .tflite files"),
        ("path:edge", "it runs .tflite files"),
        ("path:edge/none.tflite", "There is no file path:edge/none.tflite"),
        ("path:edge/out.tflite", "leads out of the model directory"),
    ],
)
def test_what_is_no_tflite_file_is_refused(folder: Path, model: str, words: str) -> None:
    link = folder / "edge" / "out.tflite"
    link.unlink(missing_ok=True)
    link.symlink_to(Path(__file__))
    with pytest.raises(UnsupportedError, match=words):
        prepared(model)


@pytest.mark.parametrize("kept", [0, 3, 8, 100, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused_before_litert_reads_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    content = (folder / "edge" / "float.tflite").read_bytes()
    cut = kept if isinstance(kept, int) else int(kept * len(content))
    (tmp_path / "cut.tflite").write_bytes(content[:cut])
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"^path:cut\.tflite is (not|a damaged)"):
        prepared("path:cut.tflite")


def test_a_file_that_is_none_or_classifies_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    (tmp_path / "page.tflite").write_text("<html><body>Log in to the network</body></html>")
    write_classifier(tmp_path / "two.tflite", quantized=False, inputs=2)
    with pytest.raises(UnsupportedError, match=r"path:page\.tflite is not a TensorFlow Lite model"):
        prepared("path:page.tflite")
    with pytest.raises(UnsupportedError, match="classify needs one input of square images"):
        prepared("path:two.tflite")


def test_a_file_that_is_not_its_manifest_s_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    write_classifier(tmp_path / "model.tflite", quantized=True)
    write_manifest(tmp_path / "model.tflite")
    write_classifier(tmp_path / "model.tflite", quantized=False)
    with pytest.raises(UnsupportedError, match=r"is not the model of the manifest\.json beside it"):
        prepared("path:model.tflite")


def test_files_are_among_the_models_of_a_worker(folder: Path) -> None:
    assert {FLOAT, INT8} <= set(held_models())
    assert "path:edge/out.tflite" not in held_models()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"workload": {"kind": "generate"}, "model": "preset:gpt2"},
            "litert does not run the workload generate",
        ),
        ({"device": "cuda"}, "litert runs on cpu, not on cuda"),
        ({"stack": [{"name": "bf16"}]}, "bf16 is for the backend torch, not for litert"),
    ],
)
def test_what_it_does_not_run_is_refused_when_a_job_is_posted(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        job(**changes)


@pytest.mark.parametrize(
    ("software", "sentence"),
    [
        ({}, f"ai-edge-litert is not installed; install it with: {INSTALL}"),
        ({"ai-edge-litert": "2"}, None),
    ],
)
def test_without_its_package_it_names_the_command(software: dict[str, str], sentence: str | None) -> None:
    assert BACKEND.missing(probe().model_copy(update={"software": software})) == sentence


def job(**changes: Any) -> JobSpec:
    document: dict[str, Any] = {
        "workload": {"kind": "classify"},
        "model": INT8,
        "backend": "litert",
        "measure": {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1},
        "limits": {"wait_for_quiet_s": 0},
    }
    return JobSpec.model_validate(document | changes)


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every child inherits the variables."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path / "own", BUILDS, OPERATORS, PEAKS).parent))
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def result(folder: Path, own_folders: None, tmp_path: Path) -> Result:
    (outcome,) = run(job(), lambda _: None, lock_dir=tmp_path, threads=1).outcomes
    assert outcome.status is VariantStatus.SUCCEEDED, outcome.reason
    assert outcome.result is not None
    return outcome.result


@pytest.mark.slow
def test_a_job_s_result_is_whole(result: Result, folder: Path) -> None:
    digest = hashlib.sha256((folder / "edge" / "int8" / "model.tflite").read_bytes()).hexdigest()
    assert VerdictReason.OUTPUT_INVALID not in result.verdict.reasons
    assert result.metrics["images_per_s"].value
    assert result.metrics["host_peak_bytes"].value
    assert result.metrics["mbu"].value
    assert result.provenance is not None
    assert result.provenance.weight_hash == digest
    assert result.facts.network is not None
    assert result.facts.network.family == "mobilenet_v2"
    assert result.facts.versions["ai-edge-litert"]
    assert "manifest" in str(result.metrics["kld_mean"].reason)


@pytest.mark.slow
def test_a_file_for_litert_ends_torch_s_variant_alone(
    folder: Path, own_folders: None, tmp_path: Path
) -> None:
    spec = job(
        beside=[{"backend": "torch"}], measure={"replicates": 1, "min_seconds": 0.01, "meters": ["latency"]}
    )
    mine, torch = run(spec, lambda _: None, lock_dir=tmp_path, threads=1).outcomes
    assert mine.status is VariantStatus.SUCCEEDED
    assert torch.status is VariantStatus.UNSUPPORTED
    assert "is a file for the backend litert" in str(torch.reason)


@pytest.mark.slow
def test_its_measuring_process_loads_neither_torch_nor_tensorflow(folder: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.classify import Classify

order = Order({INT8!r}, (), Classify(), DeviceKind.CPU, 0, 1, Path("unused"), probe())
runtime = BACKENDS["litert"].prepare(order, lambda _: None)
assert Classify().prepare(runtime).run()["images_per_s"] > 0
print(sorted({{"torch", "transformers", "tensorflow"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
