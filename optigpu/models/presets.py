"""Presets: the architectures of known models as data for transformers' configuration classes; weights are random."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
