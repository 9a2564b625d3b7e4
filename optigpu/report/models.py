"""The table of the models that need no download."""

from collections.abc import Iterator, Sequence

from optigpu.models.families import family_of
from optigpu.models.presets import IMAGE_PRESETS, PRESETS
from optigpu.models.reference import BUNDLED, bundled_config, bundled_parameters
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import short
from optigpu.vocabulary import Document

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight in each dtype that the table has."""


def model_facts() -> list[Document]:
    """Each model as plain JSON: what it does, its family, how many weights it has, and their bytes by dtype."""
    return [*_bundled(), *_presets()]


def _bundled() -> Iterator[Document]:
    for name, folder in BUNDLED.items():
        source = f"{folder.name}/MODEL_CARD.md"
        family = bundled_config(name)["model_type"]
        yield _facts(f"bundled:{name}", "text", family, bundled_parameters(name), True, source)


def _presets() -> Iterator[Document]:
    for does, presets in (("text", PRESETS), ("images", IMAGE_PRESETS)):
        for name, preset in presets.items():
            yield _facts(f"preset:{name}", does, preset.model_type, preset.parameters, False, preset.source)


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
        columns=(
            Column("model"),
            Column("for"),
            Column("family"),
            Column("parameters", right=True),
            *(Column(f"{dtype} (MB)", right=True) for dtype in WIDTHS),
            Column("weights"),
            Column("source"),
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
