"""The table of models: those that can be brought, those that lie in the models folder, those that need no download."""

from collections.abc import Sequence

from optigpu.models.bring import is_brought
from optigpu.models.families import family_of
from optigpu.models.held import held_models
from optigpu.models.presets import IMAGE_PRESETS, PRESETS
from optigpu.models.reference import BUNDLED, bundled_config, bundled_parameters
from optigpu.models.trained import TRAINED
from optigpu.report.formats import Grid, columns
from optigpu.report.numbers import MISSING, short
from optigpu.vocabulary import Document

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight in each dtype that the table has."""
HERE = "here"


def model_facts() -> list[Document]:
    """Each model as plain JSON: what it does, its family, how many weights it has, their bytes by dtype, and how it is
    had: "here", or the command that brings it. What nobody brought and nobody described is null."""
    return [*_trained(), *_packaged()]


def _trained() -> list[Document]:
    facts = []
    for name, each in TRAINED.items():
        how = HERE if is_brought(each) else f"optigpu models get {name}"
        fact = _facts(f"path:{name}", "text", each.family, each.parameters, True, each.original)
        facts.append({**fact, "licence": each.licence, "had": how})
    named = {fact["model"] for fact in facts}
    others = [held for held in held_models() if held.startswith("path:") and held not in named]
    unknown = dict.fromkeys(facts[0])
    return [*facts, *({**unknown, "model": held, "had": HERE} for held in others)]


def _packaged() -> list[Document]:
    facts = []
    for name, folder in BUNDLED.items():
        family, parameters = family_of(bundled_config(name)["model_type"]).title, bundled_parameters(name)
        source = f"{folder.name}/MODEL_CARD.md"
        facts.append(_facts(f"bundled:{name}", "text", family, parameters, True, source))
    for does, presets in (("text", PRESETS), ("images", IMAGE_PRESETS)):
        for name, each in presets.items():
            family = family_of(each.model_type).title
            facts.append(_facts(f"preset:{name}", does, family, each.parameters, False, each.source))
    return facts


def _facts(model: str, does: str, family: str, parameters: int, trained: bool, source: str) -> Document:
    return {
        "model": model,
        "for": does,
        "family": family,
        "parameters": parameters,
        **{f"{dtype}_bytes": width * parameters for dtype, width in WIDTHS.items()},
        "trained": trained,
        "source": source,
        "licence": None,
        "had": HERE,
    }


def models_grid(facts: Sequence[Document]) -> Grid:
    """The models, with the bytes of their weights."""
    headings = ("model", "for", "family", "parameters:", *(f"{dtype} (MB):" for dtype in WIDTHS))
    return Grid(
        title="Models",
        columns=columns(*headings, "weights", "to be had by", "source"),
        rows=tuple(_cells(fact) for fact in facts),
        notes=(
            "Random weights are right for speed and memory, and have no quality.",
            "path:NAME lies in the models folder, OPTIGPU_MODELS_DIR or `models` in the data folder, where you may put "
            "others; any model of the hub is hub:ORG/NAME@REVISION.",
        ),
    )


def _cells(fact: Document) -> tuple[str, ...]:
    parameters, trained = fact["parameters"], fact["trained"]
    return (
        fact["model"],
        fact["for"] or MISSING,
        fact["family"] or MISSING,
        MISSING if parameters is None else f"{parameters:,}",
        *(MISSING if parameters is None else short(width * parameters * 1e-6) for width in WIDTHS.values()),
        MISSING if trained is None else "trained" if trained else "random",
        fact["had"],
        fact["source"] or MISSING,
    )
