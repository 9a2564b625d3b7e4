"""Facts about a model that are known without loading it."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from optigpu.documents.facts import ImageFacts, ModelFacts
from optigpu.models.families import family_of
from optigpu.models.reference import IMAGE_PRESETS, ModelReference
from optigpu.models.tensors import Description

Facts = ModelFacts | ImageFacts
_USUAL_SIZE = 224
"""He et al., Deep Residual Learning, 2015: the crops that ImageNet's classifiers are trained on ever since."""


def known_facts(reference: ModelReference) -> Facts | None:
    """The facts of a preset or a bundled model; None for other models."""
    if reference.kind == "preset" and reference.name in IMAGE_PRESETS:
        preset = IMAGE_PRESETS[reference.name]
        return image_facts_from_config(preset.model_type, preset.config)
    return facts_of(reference)


def facts_of(reference: ModelReference) -> ModelFacts | None:
    """As `known_facts`; None for an image classifier as well."""
    known = packaged().get(str(reference))
    return known.facts if known else None


def image_facts_from_config(family: str, config: Mapping[str, Any]) -> ImageFacts:
    """By the attributes of a transformers configuration; of a size that is not square the longer side counts."""
    size = config.get("image_size") or _USUAL_SIZE
    width = config.get("depth_multiplier", 1)
    return ImageFacts(
        family=family,
        channels=int(config.get("num_channels", 3)),
        image_size=int(size if isinstance(size, int) else max(size)),
        classes=int(config["num_labels"]),
        fixed_size=family_of(family).fixed_image_size,
        alpha=None if width == 1 else f"{width:g}",
    )


PACKAGED = Path(__file__).parent / "packaged.json"


@cache
def packaged() -> Mapping[str, Description]:
    found = json.loads(PACKAGED.read_text("utf-8"))
    return {reference: Description.model_validate(about) for reference, about in found.items()}
