"""A model reference: one string that names a model.

`preset:NAME` an architecture with seeded random weights, `bundled:NAME` a trained model inside the package,
`hub:ORG/NAME@REVISION` a repository of the model hub, `path:DIR` a directory under `OPTIGPU_MODELS_DIR`. A bare name is
a hub name.
"""

import json
import re
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from optigpu.documents.fields import require_known
from optigpu.models.presets import IMAGE_PRESETS, PRESETS, Preset
from optigpu.vocabulary import Frozen, SpecError

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
