"""The trained models inside the package. `tools/train_tiny.py` makes them; each folder has a MODEL_CARD.md."""

import json
from pathlib import Path
from typing import Any

BUNDLED: dict[str, Path] = {"tiny": Path(__file__).parent / "bundled_tiny"}
"""The folder of each: config.json, model.safetensors, tokenizer.json, as a `path:` model has them."""


def bundled_config(name: str) -> dict[str, Any]:
    """The transformers configuration of a bundled model."""
    config: dict[str, Any] = json.loads((BUNDLED[name] / "config.json").read_text("utf-8"))
    return config
