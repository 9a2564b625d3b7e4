"""The trained models inside the package. `tools/train_bundled.py` makes them; each folder has a MODEL_CARD.md."""

import json
from math import prod
from pathlib import Path
from typing import Any

BUNDLED: dict[str, Path] = {name: Path(__file__).parent / f"bundled_{name}" for name in ("tiny", "small")}
"""The folder of each: config.json, model.safetensors, tokenizer.json, as a `path:` model has them."""


def bundled_config(name: str) -> dict[str, Any]:
    """The transformers configuration of a bundled model."""
    config: dict[str, Any] = json.loads((BUNDLED[name] / "config.json").read_text("utf-8"))
    return config


def bundled_parameters(name: str) -> int:
    """How many weights a bundled model has, by the header of its safetensors file: its length in 8 bytes, then JSON."""
    with (BUNDLED[name] / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    count: int = sum(prod(tensor["shape"]) for key, tensor in header.items() if key != "__metadata__")
    return count
