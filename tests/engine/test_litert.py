"""The litert backend: scores as numpy and LiteRT's reference kernels have them, facts, what it refuses, whole jobs."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from numpy.typing import NDArray

from optigpu.documents.facts import NetworkFacts
from optigpu.documents.result import Result, VerdictReason
from optigpu.models.held import held_models
from optigpu.models.loading.load import MODELS_DIR
from optigpu.vocabulary import UnsupportedError, VariantStatus
from optigpu.workloads.classify import Classify
from tests.engine import converted_engines
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, own_folders
from tests.engine.sessions import measured, quick_job

pytestmark = pytest.mark.usefixtures("forked_children")

SIDE, CLASSES, CHANNELS = 32, 10, 8
FLOAT32, INT32, INT8 = 0, 2, 9
IMAGE_SCALE, HIDDEN_SCALE, SCORE_SCALE, WEIGHT_SCALE = 1 / 32, 1 / 64, 1 / 64, 1 / 256
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class TinyWeights:
    """The numbers of the network, multiples of WEIGHT_SCALE: [channels, 3, 3, 3] and [classes, channels]."""

    filters: Floats
    matrix: Floats

    def scores(self, images: Floats) -> Floats:
        """In numpy, of images [batch, 3, side, side]: [batch, classes]."""
        padded = np.pad(images.transpose(0, 2, 3, 1), ((0, 0), (0, 1), (0, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::2, ::2]
        hidden = np.einsum("bxychw,khwc->bxyk", windows, self.filters)
        found: Floats = np.maximum(hidden, 0).mean(axis=(1, 2)) @ self.matrix.T
        return found


def tiny_weights(seed: int = 0) -> TinyWeights:
    source = np.random.default_rng(seed)

    def drawn(*shape: int) -> Floats:
        return np.asarray(source.integers(-100, 100, shape) * WEIGHT_SCALE, np.float32)

    return TinyWeights(drawn(CHANNELS, 3, 3, 3), drawn(CLASSES, CHANNELS))


def write_classifier(path: Path, *, quantized: bool, inputs: int = 1, side: int = SIDE) -> TinyWeights:
    """Writes the file; a quantized one's input and output are int8. `inputs` above 1 adds inputs that nothing reads."""
    weights = tiny_weights()
    model = _Writer(quantized)
    image = model.tensor("image", (1, side, side, 3), IMAGE_SCALE)
    others = [model.tensor(f"unused{n}", (1, side, side, 3), IMAGE_SCALE) for n in range(1, inputs)]
    hidden = model.tensor("hidden", (1, side // 2, side // 2, CHANNELS), HIDDEN_SCALE)
    pooled = model.tensor("pooled", (1, CHANNELS), HIDDEN_SCALE)
    scores = model.tensor("scores", (1, CLASSES), SCORE_SCALE)
    convolution = schema.Conv2DOptionsT(strideW=2, strideH=2, fusedActivationFunction=1)
    model.operator(
        schema.BuiltinOperator.CONV_2D,
        [image, model.constant("filters", weights.filters), model.bias(CHANNELS, IMAGE_SCALE)],
        hidden,
        schema.BuiltinOptions.Conv2DOptions,
        convolution,
    )
    places = model.whole_numbers("places", np.array([1, 2], np.int32))
    reduce = schema.ReducerOptionsT(keepDims=False)
    model.operator(
        schema.BuiltinOperator.MEAN, [hidden, places], pooled, schema.BuiltinOptions.ReducerOptions, reduce
    )
    model.operator(
        schema.BuiltinOperator.FULLY_CONNECTED,
        [pooled, model.constant("matrix", weights.matrix), model.bias(CLASSES, HIDDEN_SCALE)],
        scores,
        schema.BuiltinOptions.FullyConnectedOptions,
        schema.FullyConnectedOptionsT(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.file([image, *others], [scores]))
    return weights


def write_manifest(path: Path, **network: object) -> None:
    """The manifest that `optigpu convert` would write beside such a file, for the parts that are read of it."""
    content = path.read_bytes()
    tensor = {"dtype": "int8", "scale": IMAGE_SCALE, "zero_point": 0}
    manifest: dict[str, Any] = {
        "schema": 1,
        "sha256": hashlib.sha256(content).hexdigest(),
        "network": {"family": "mobilenet_v2", "alpha": "0.35", "input": [SIDE, SIDE, 3], "classes": CLASSES}
        | network,
        "model_bytes": len(content),
        "operators": [{"name": "CONV_2D", "count": 1, "macs": 1000}],
        "macs": 1000,
        "parameter_bytes": 100,
        "arena_bytes": 1000,
        "input": tensor | {"shape": [1, SIDE, SIDE, 3]},
        "output": tensor | {"shape": [1, CLASSES]},
        "agreement": {"samples": 0, "reason": "made for a test"},
        "calibration": {"kind": "random", "samples": 1},
        "rankable": False,
        "golden": {"count": 1, "inputs_sha256": "0" * 64, "outputs": ["00" * CLASSES]},
        "tools": {},
    }
    path.with_name("manifest.json").write_text(json.dumps(manifest))


class _Writer:
    """Collects the tensors, constants and operators of one graph."""

    def __init__(self, quantized: bool) -> None:
        self._quantized = quantized
        self._buffers = [schema.BufferT(data=[])]
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._codes: list[Any] = []

    def tensor(self, name: str, shape: tuple[int, ...], scale: float, buffer: int = 0) -> int:
        """The number of a tensor of images, activations or weights."""
        kind = INT8 if self._quantized else FLOAT32
        return self._add(name, shape, kind, scale if self._quantized else None, buffer)

    def constant(self, name: str, values: Floats) -> int:
        stored = np.rint(values / WEIGHT_SCALE).astype(np.int8) if self._quantized else values
        return self.tensor(name, values.shape, WEIGHT_SCALE, self._buffer(stored))

    def bias(self, size: int, given_scale: float) -> int:
        """Zeros."""
        if not self._quantized:
            return self.constant(f"bias{size}", np.zeros(size, np.float32))
        buffer = self._buffer(np.zeros(size, np.int32))
        return self._add(f"bias{size}", (size,), INT32, given_scale * WEIGHT_SCALE, buffer)

    def whole_numbers(self, name: str, values: NDArray[np.int32]) -> int:
        return self._add(name, values.shape, INT32, None, self._buffer(values))

    def operator(self, code: int, inputs: list[int], output: int, kind: int, options: object) -> None:
        self._codes.append(schema.OperatorCodeT(deprecatedBuiltinCode=code, builtinCode=code, version=1))
        self._operators.append(
            schema.OperatorT(
                opcodeIndex=len(self._codes) - 1,
                inputs=inputs,
                outputs=[output],
                builtinOptionsType=kind,
                builtinOptions=options,
            )
        )

    def file(self, inputs: list[int], outputs: list[int]) -> bytes:
        graph = schema.SubGraphT(
            tensors=self._tensors, inputs=inputs, outputs=outputs, operators=self._operators
        )
        model = schema.ModelT(version=3, operatorCodes=self._codes, subgraphs=[graph], buffers=self._buffers)
        builder = flatbuffers.Builder(1024)
        builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
        return bytes(builder.Output())

    def _add(self, name: str, shape: tuple[int, ...], kind: int, scale: float | None, buffer: int) -> int:
        quantization = None if scale is None else schema.QuantizationParametersT(scale=[scale], zeroPoint=[0])
        self._tensors.append(
            schema.TensorT(shape=list(shape), type=kind, buffer=buffer, name=name, quantization=quantization)
        )
        return len(self._tensors) - 1

    def _buffer(self, values: NDArray[np.generic]) -> int:
        self._buffers.append(schema.BufferT(data=list(values.tobytes())))
        return len(self._buffers) - 1


FLOAT_FILE, INT8_FILE = "path:edge/float.tflite", "path:edge/int8/model.tflite"


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
    done = prepared(FLOAT_FILE, batch).forward(given)
    expected = weights.scores(given)
    np.testing.assert_allclose(done.logits, expected, rtol=1e-4, atol=1e-4)
    assert done.chosen.tolist() == expected.argmax(axis=1).tolist()
    assert done.seconds > 0


@pytest.mark.parametrize("batch", [1, 3])
def test_an_int8_file_gives_the_scores_of_the_reference_kernels(folder: Path, batch: int) -> None:
    given = images(batch)
    done = prepared(INT8_FILE, batch).forward(given)
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


def test_it_says_which_file_and_which_network_ran(folder: Path) -> None:
    content = (folder / "edge" / "int8" / "model.tflite").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    runtime = prepared(INT8_FILE, threads=2)
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


@pytest.mark.parametrize("kept", [0, 8, 0.5, 0.999])
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
    assert {FLOAT_FILE, INT8_FILE} <= set(held_models())
    assert "path:edge/out.tflite" not in held_models()


@pytest.fixture
def result(folder: Path, tmp_path: Path) -> Result:
    spec = quick_job(workload={"kind": "classify"}, model=INT8_FILE, backend="litert")
    with own_folders(tmp_path, BUILDS, OPERATORS, PEAKS):
        (outcome,) = measured(spec, tmp_path).outcomes
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
def test_its_measuring_process_loads_neither_torch_nor_tensorflow(folder: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.classify import Classify

order = Order({INT8_FILE!r}, (), Classify(), DeviceKind.CPU, 0, 1, Path("unused"), probe())
runtime = BACKENDS["litert"].prepare(order, lambda _: None)
assert Classify().prepare(runtime).run()["images_per_s"] > 0
print(sorted({{"torch", "transformers", "tensorflow"}} & set(sys.modules)))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[]"
