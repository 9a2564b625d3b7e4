"""What a conversion is asked for."""

import os
import re
import zipfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from optigpu.vocabulary import Frozen, SpecError

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
