"""A tiny image classifier as a .tflite file, written by its schema: a convolution, a mean over the places, a matrix."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

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
