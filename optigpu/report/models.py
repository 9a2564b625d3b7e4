"""The table of the models that need no download."""

from collections.abc import Sequence

from optigpu.models.families import family_of
from optigpu.models.presets import IMAGE_PRESETS, PRESETS
from optigpu.models.reference import BUNDLED, bundled_config, bundled_parameters
from optigpu.report.formats import Grid, columns
from optigpu.report.numbers import short
from optigpu.vocabulary import Document

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight in each dtype that the table has."""


def model_facts() -> list[Document]:
    """Each model as plain JSON: what it does, its family, how many weights it has, and their bytes by dtype."""
    facts = []
    for name, folder in BUNDLED.items():
        family, parameters = bundled_config(name)["model_type"], bundled_parameters(name)
        facts.append(
            _facts(f"bundled:{name}", "text", family, parameters, True, f"{folder.name}/MODEL_CARD.md")
        )
    for does, presets in (("text", PRESETS), ("images", IMAGE_PRESETS)):
        for name, each in presets.items():
            facts.append(_facts(f"preset:{name}", does, each.model_type, each.parameters, False, each.source))
    return facts


def _facts(model: str, does: str, family: str, parameters: int, trained: bool, source: str) -> Document:
    return {
        "model": model,
        "for": does,
        "family": family_of(family).title,
        "parameters": parameters,
        **{f"{dtype}_bytes": width * parameters for dtype, width in WIDTHS.items()},
        "trained": trained,
        "source": source,
    }


def models_grid(facts: Sequence[Document]) -> Grid:
    """The models, with the bytes of their weights."""
    return Grid(
        title="Models that need no download",
        columns=columns(
            "model",
            "for",
            "family",
            "parameters:",
            *(f"{dtype} (MB):" for dtype in WIDTHS),
            "weights",
            "source",
        ),
        rows=tuple(
            (
                fact["model"],
                fact["for"],
                fact["family"],
                f"{fact['parameters']:,}",
                *(short(fact[f"{dtype}_bytes"] * 1e-6) for dtype in WIDTHS),
                "trained" if fact["trained"] else "random",
                fact["source"],
            )
            for fact in facts
        ),
        notes=(
            "Random weights are right for speed and memory, and have no quality.",
            "Any other model is hub:ORG/NAME@REVISION, or path:DIR under OPTIGPU_MODELS_DIR.",
        ),
    )
