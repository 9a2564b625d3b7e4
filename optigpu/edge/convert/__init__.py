"""Converts a Keras network to INT8 TensorFlow Lite, and proves it. Nothing is written unless all of it went well.
TensorFlow, LiteRT and TFLite Micro run in processes of their own: TensorFlow and triton in one process crash, and an
interpreter may abort on a model that it does not like."""

import hashlib
import json
import os
import re
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from optigpu.documents.manifest import Calibration, ModelManifest, Network
from optigpu.edge.convert.process import (
    GOLDEN,
    MANIFEST,
    ConversionError,
    Doing,
    Stop,
    Watch,
    c_array,
    choose_python,
    publish,
    run_program,
    work_folder,
)
from optigpu.edge.gate import agreement, check_model, format_of, golden_of, read_golden
from optigpu.edge.tflite import Model, operator_counts, read_tflite
from optigpu.vocabulary import Document, Frozen, SpecError

Pixels = Literal["signed", "unit", "bytes"]
WIDTHS = ("0.35", "0.50", "0.75", "1.0", "1.3", "1.4")
"""The widths for which ImageNet's weights exist."""
SIZES = (96, 128, 160, 192, 224)
IMAGENET_CLASSES = 1000
LEAST_SIDE = 32
_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")


class MobileNet(Frozen):
    """Keras's MobileNetV2. `alpha` is the width, `side` the height and width of its input."""

    alpha: str = Field("1.0", pattern=r"^\d+(\.\d+)?$", max_length=8)
    side: int = Field(224, ge=LEAST_SIDE, le=1024)
    classes: int = Field(1000, ge=2, le=100_000)
    weights: Literal["random", "imagenet"] = "random"


class NetworkFile(Frozen):
    """A .keras file, or the folder of a SavedModel."""

    path: Path


class Data(Frozen):
    """What the model is calibrated and compared with; `path` is null for random inputs."""

    kind: Literal["images", "npz", "random"]
    path: Path | None = None
    samples: int = Field(128, ge=2, le=10_000)


class ConversionRequest(Frozen):
    """One conversion. `output` is the folder, `name` that of the files in it.

    `arena_limit` is the largest tensor arena that is accepted, `python` a Python that has TensorFlow.
    """

    network: MobileNet | NetworkFile
    data: Data
    pixels: Pixels | None = None
    output: Path
    name: str = "model"
    seed: int = Field(0, ge=0, le=2**31 - 1)
    arena_limit: Annotated[int, Field(ge=1024)] = 64 * 2**20
    allow_unaccelerated: bool = False
    python: Path | None = None
    timeout_s: float = Field(1800.0, gt=0)


def check_request(request: ConversionRequest) -> None:
    """Raises SpecError for what can be seen to be wrong before anything is started."""
    if not _NAME.match(request.name):
        raise SpecError(
            f"--name {request.name}: write letters, digits and _, since it also names the C array."
        )
    match request.network:
        case MobileNet():
            _check_imagenet(request.network)
        case NetworkFile(path=path):
            _check_file(path, request)
    data = request.data
    if data.kind == "images" and data.path is not None and not os.path.isdir(data.path):
        raise SpecError(f"--images {data.path}: there is no such folder.")
    if data.kind == "npz" and data.path is not None and not os.path.isfile(data.path):
        raise SpecError(f"--npz {data.path}: there is no such file.")


def _check_imagenet(network: MobileNet) -> None:
    if float(network.alpha) <= 0:
        raise SpecError(f"--alpha {network.alpha}: the width multiplier must be positive.")
    if network.weights != "imagenet":
        return
    if float(network.alpha) not in map(float, WIDTHS) or network.side not in SIZES:
        raise SpecError(
            f"ImageNet's weights exist for --alpha {', '.join(WIDTHS)} and --input {', '.join(map(str, SIZES))}."
        )
    if network.classes != IMAGENET_CLASSES:
        raise SpecError(f"ImageNet's weights have {IMAGENET_CLASSES} classes; leave out --classes.")


def _check_file(path: Path, request: ConversionRequest) -> None:
    if not os.path.exists(path):
        raise SpecError(f"{path}: there is no such file or folder.")
    if os.path.isfile(path) and path.suffix != ".keras":
        raise SpecError(
            f"{path} is not a model that is read; give a .keras file or the folder of a SavedModel."
        )
    if os.path.isfile(path) and not zipfile.is_zipfile(path):
        raise SpecError(f"{path} is not a .keras file, which is a zip archive, or it is truncated.")
    if os.path.isdir(path) and not (path / "saved_model.pb").is_file():
        raise SpecError(f"{path} holds no saved_model.pb; give a .keras file or the folder of a SavedModel.")
    if request.data.kind == "images" and request.pixels is None:
        raise SpecError(
            "Say with --pixels how the network was trained: signed (-1 to 1), unit (0 to 1) or bytes (0 to 255)."
        )


MODEL = "model.tflite"
GOLDEN_COUNT = 8
COMPARED_MACS = 5_000_000_000
"""Reference kernels do some 10^8 MACs a second: so many are spent on comparing with FP32."""
LEAST_COMPARED, MOST_COMPARED = 4, 64


@dataclass(frozen=True)
class Converted:
    """The manifest and where it lies; beside it the model, golden.bin and the C array."""

    manifest: ModelManifest
    folder: Path
    files: tuple[str, ...]


def convert(request: ConversionRequest, doing: Doing, stop: Stop = lambda: None) -> Converted:
    """Converts, checks and writes a model; `doing` is told what goes on, and `stop` asked whether to go on. Raises
    SpecError for a wrong request, UnsupportedError for a network that cannot run on a device, ConversionError for a
    conversion that died or took too long, and CancelledError when it is stopped."""
    check_request(request)
    python = choose_python(request.python)
    watch = Watch(doing, time.monotonic() + request.timeout_s, stop)
    with work_folder(request.output) as folder:

        def step(name: str, told: dict[str, object]) -> Document:
            return run_program(
                python, name, {"folder": str(folder.resolve()), "seed": request.seed, **told}, watch
            )

        built = step("build", _build_request(request))
        model = read_tflite(folder / MODEL)
        check_model(model, allow_unaccelerated=request.allow_unaccelerated)
        evaluated = step("evaluate", _evaluate_request(request, model))
        manifest = _manifest(request, folder, model, {**built, "evaluated": evaluated})
        names = _write(request.name, folder, manifest)
        publish(folder, names, request.output)
    return Converted(manifest, request.output, names)


def _build_request(request: ConversionRequest) -> dict[str, object]:
    network: dict[str, object]
    match request.network:
        case MobileNet() as mobile:
            network = {"family": "mobilenet_v2", **mobile.model_dump()}
        case NetworkFile(path=path):
            network = {"family": "file", "path": str(path.resolve()), "weights": "file"}
    data = request.data
    path_of = None if data.path is None else str(data.path.resolve())
    return network | {
        "data": data.kind,
        "data_path": path_of,
        "samples": data.samples,
        "pixels": request.pixels or "signed",  # as Keras trains MobileNetV2
    }


def _evaluate_request(request: ConversionRequest, model: Model) -> dict[str, object]:
    macs = sum(each.macs for each in operator_counts(model))
    compared = min(MOST_COMPARED, max(LEAST_COMPARED, COMPARED_MACS // max(macs, 1)))
    entry = format_of(model.inputs[0])
    return {
        "arena_limit": request.arena_limit,
        "golden": GOLDEN_COUNT,
        "compared": compared,
        "scale": entry.scale,
        "zero_point": entry.zero_point,
    }


def _manifest(request: ConversionRequest, folder: Path, model: Model, told: Document) -> ModelManifest:
    content = (folder / MODEL).read_bytes()
    counts = operator_counts(model)
    entry, output = format_of(model.inputs[0]), format_of(model.outputs[0])
    with np.load(folder / "held_out.npz", allow_pickle=False) as file:
        floats = file["outputs"]
    pairs = read_golden(folder / GOLDEN)
    if len(pairs) != GOLDEN_COUNT or any(len(each.input) != entry.bytes for each in pairs):
        raise ConversionError("The golden vectors do not fit the model; this is an error of OptiGPU.")
    mobile = request.network if isinstance(request.network, MobileNet) else None
    return ModelManifest(
        sha256=hashlib.sha256(content).hexdigest(),
        network=Network(
            family="mobilenet_v2" if mobile else "file",
            alpha=mobile.alpha if mobile else None,
            input=entry.shape[1:],
            classes=output.shape[1] if len(output.shape) == 2 else None,
            weights=mobile.weights if mobile else "file",
            seed=request.seed,
        ),
        model_bytes=len(content),
        operators=counts,
        macs=sum(each.macs for each in counts),
        parameter_bytes=model.parameter_bytes,
        arena_bytes=told["evaluated"]["arena_bytes"],
        input=entry,
        output=output,
        agreement=agreement(floats, np.load(folder / "int8.npy", allow_pickle=False), output),
        calibration=Calibration(kind=request.data.kind, samples=told["calibrated"]),
        rankable=request.data.kind != "random",
        golden=golden_of(pairs, told["evaluated"]["left_out"]),
        tools=dict(sorted((told["tools"] | told["evaluated"]["tools"]).items())),
    )


def _write(name: str, folder: Path, manifest: ModelManifest) -> tuple[str, ...]:
    """Writes what is still missing into the temporary folder; returns the names of all files."""
    content = (folder / MODEL).read_bytes()
    (folder / MODEL).rename(folder / f"{name}.tflite")
    source, header = c_array(name, content)
    (folder / f"{name}.cc").write_text(source, encoding="ascii")
    (folder / f"{name}.h").write_text(header, encoding="ascii")
    document = json.dumps(manifest.model_dump(mode="json"), indent=2) + "\n"
    (folder / MANIFEST).write_text(document, encoding="utf-8")
    return (f"{name}.tflite", f"{name}.cc", f"{name}.h", GOLDEN, MANIFEST)
