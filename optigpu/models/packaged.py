"""What the presets and bundled models are made of. `tools/describe_models.py` writes it; a test compares."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from optigpu.models.tensors import Description

PACKAGED = Path(__file__).parent / "packaged.json"
"""By references: an object of descriptions."""


@cache
def packaged() -> Mapping[str, Description]:
    """Of each preset and bundled model that generates text, by its reference."""
    found = json.loads(PACKAGED.read_text("utf-8"))
    return {reference: Description.model_validate(about) for reference, about in found.items()}
