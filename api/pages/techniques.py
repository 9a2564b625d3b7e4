"""The page at `/techniques`: what each does, what it bought where it was measured, its citation and its conflicts."""

from collections import defaultdict
from enum import StrEnum
from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.pages.bars import FigureText
from api.pages.view import Asked, ReaderView
from optigpu.report.catalog import parameters_text, technique_fact
from optigpu.report.numbers import ratio
from optigpu.store import filters, tallies
from optigpu.store.tallies import MeasuredGain
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import Layer

router = APIRouter()
SHOWN_GAINS = 6

LayerName = StrEnum("LayerName", {layer.value: layer.value for layer in Layer})  # type: ignore[misc]


class TechniquesAsked(Asked):
    """Which of them."""

    layer: Annotated[LayerName | None, Query(description="A layer of the stack.")] = None
    measured: Annotated[bool, Query(description="Only those that were measured here.")] = False


@router.get("/techniques")
def read_techniques(view: ReaderView, asked: Annotated[TechniquesAsked, Query()]) -> Response:
    """By layer."""
    with view.service.database.read() as session:
        found = tallies.alone(session)
        known = filters.names(session, "technique")
    here: dict[str, list[MeasuredGain]] = defaultdict(list)
    for gain in found:
        here[gain.technique].append(gain)
    facts = [technique_fact(kind) for kind in TECHNIQUES.values()]
    shown = [
        (fact, parameters_text(fact), [(gain, _text(gain)) for gain in here[fact["name"]][:SHOWN_GAINS]])
        for fact in facts
        if asked.layer in (None, fact["layer"]) and (here[fact["name"]] or not asked.measured)
    ]
    return view.page(
        "techniques.html",
        asked=asked,
        techniques=shown,
        known=known,
        layers=list(LayerName),
        every=len(facts),
    )


def _text(gain: MeasuredGain) -> FigureText:
    text, _, spread = ratio(gain.gain).partition(" ")
    return FigureText(text, spread)
