"""A figure as a bar with its interval, a verdict as a badge with its sentences, and a result as a picture.

`/badge/{id}.svg` is a small one for a README, "23x on EPYC"; `/results/{id}/image.png` is shown where the result's
address is shared (Open Graph).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.auth import Reader
from api.inputs import Id, Uuid
from api.rendering import EXPORT_POLICY, metric_heading, variant_line
from api.service import ServiceDep
from optigpu.documents.result import Gain, MetricSummary
from optigpu.documents.versions import current
from optigpu.report.charts.svg import FAMILY, png
from optigpu.report.charts.svg.markup import element, shortened, text, text_width
from optigpu.report.formats import ratio, short, with_interval
from optigpu.report.rows import REASONS, WARNINGS, heading
from optigpu.store import leaderboard, results
from optigpu.vocabulary import METRICS, Document


@dataclass(frozen=True)
class Bar:
    """Percent of the width. Without an interval there are no whiskers."""

    end: float
    low: float = 0.0
    high: float = 0.0
    sure: bool = False


@dataclass(frozen=True)
class FigureText:
    """A figure, and its interval as text."""

    text: str
    spread: str


def speedup_text(baseline: MetricSummary, candidate: MetricSummary | Document) -> FigureText | None:
    """`23.1x` and its interval; None where there is no ratio. A candidate may be a summary as it was stored."""
    from optigpu.statistics.compare import (
        StoredSummary,
        speedup,  # here, because it loads numpy
    )

    found = speedup(
        *(StoredSummary.model_validate(side, from_attributes=True) for side in (baseline, candidate))
    )
    if found is None:
        return None
    text, _, spread = ratio(Gain(ratio=found[0], ci=found[1], compared_with=0)).partition(" ")
    return FigureText(text, spread)


def bars(figures: Sequence[MetricSummary]) -> list[Bar]:
    """From 0, on one scale, so that their lengths compare."""
    ends = [figure.ci[1] if figure.ci else figure.value or 0.0 for figure in figures]
    most = max([0.0, *ends]) or 1.0
    return [_bar(figure, 100.0 / most) for figure in figures]


def _bar(figure: MetricSummary, scale: float) -> Bar:
    end = _within((figure.value or 0.0) * scale)
    if figure.ci is None:
        return Bar(end)
    low, high = (_within(bound * scale) for bound in figure.ci)
    return Bar(end, low, high, sure=True)


def _within(percent: float) -> float:
    return round(min(100.0, max(0.0, percent)), 2)


def figure_text(figure: MetricSummary | None, scale: float = 1.0) -> FigureText:
    """`42.1` and `±1.5`; a missing one is "-"."""
    summary = {"value": figure.value, "ci": figure.ci} if figure else None
    text, _, spread = with_interval(summary, scale).partition(" ")
    return FigureText(text, spread)


@dataclass(frozen=True)
class Measured:
    """A metric as a line of the table."""

    name: str
    meaning: str
    figure: FigureText
    unit: str
    summary: Document


def primary_of(document: Document) -> Measured:
    """The metric that the result is ranked by."""
    return measured(document, document["variant"]["primary_metric"])


def measured(document: Document, name: str) -> Measured:
    """The metric of this name, which the result may not have."""
    summary = document["metrics"].get(name) or {"value": None, "reason": "not measured", "unit": ""}
    text, _, spread = with_interval(summary).partition(" ")
    meaning = METRICS[name].meaning if name in METRICS else ""
    return Measured(name, meaning, FigureText(text, spread), _unit(summary["unit"]), summary)


def _unit(unit: str) -> str:
    return {"1": "", "1/s": "per s"}.get(unit, unit)


@dataclass(frozen=True)
class Badge:
    """`kind` is good, warn, bad or plain."""

    kind: str
    word: str
    meanings: tuple[str, ...] = ()


def badge(reasons: Sequence[str], warnings: Sequence[str]) -> Badge:
    """Of a result: not valid for these reasons, or valid with these warnings."""
    if reasons:
        return Badge("bad", "invalid", tuple(_sentence(REASONS.get(each, each)) for each in reasons))
    if warnings:
        word = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
        return Badge("warn", word, tuple(_sentence(WARNINGS.get(each, each)) for each in warnings))
    return Badge("good", "valid")


def sentences(verdict: Document) -> tuple[str, ...]:
    """The verdict in words: what it is, then each reason and warning with what was noted about it."""
    names = [*verdict["reasons"], *verdict["warnings"]]
    notes = list(verdict.get("notes", ()))
    known = REASONS | WARNINGS
    said = [_sentence(known.get(name, name)) for name in names] if len(notes) < len(names) else notes
    if verdict["valid"]:
        return ("Valid: it is ranked.", *said)
    return ("Not valid: it is not ranked.", *said)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


router = APIRouter()
KEPT_S = 300
LETTER, AROUND = 6.6, 10
"""The width of a letter and of what is around a text, in pixels."""
LONGEST_HARDWARE = 40
_NOISE = re.compile(r"\(R\)|\(TM\)|\bCPU\b|\bProcessor\b|\d+-Core|@.*|\b(AMD|Intel|NVIDIA)\b|^\d+x ")

Named = Annotated[Uuid, Path(alias="id", description="The id of a result.")]


@router.get("/badge/{id}.svg")
def read_badge(service: ServiceDep, _: Reader, result_id: Named) -> Response:
    """Anybody's page may show it."""
    with service.database.read() as session:
        document = current(results.get(session, result_id))
        baseline = leaderboard.baseline_of(session, result_id)
    words = badge_words(document, None if baseline is None else baseline.value)
    headers = {
        "Cache-Control": f"public, max-age={KEPT_S}",
        "Content-Security-Policy": EXPORT_POLICY,
        "Cross-Origin-Resource-Policy": "cross-origin",
    }
    return Response(
        _badge_svg("OptiGPU", words, valid=document["verdict"]["valid"]),
        media_type="image/svg+xml",
        headers=headers,
    )


def badge_words(document: Document, baseline: MetricSummary | None) -> str:
    """`23.1x on EPYC 9654`; without a baseline the figure itself."""
    name = document["variant"]["primary_metric"]
    primary = document["metrics"].get(name)
    where = f"on {short_hardware(document['environment']['hardware_class'])}"
    if not document["verdict"]["valid"]:
        return f"not valid {where}"
    if not primary or primary["value"] is None:
        return f"not measured {where}"
    gain = speedup_text(baseline, primary) if baseline else None
    if gain is not None:
        return f"{gain.text} {where}"
    return f"{short(primary['value'])} {heading(name) if name in METRICS else name} {where}"


def short_hardware(hardware: str) -> str:
    """A class of hardware by its model alone."""
    words = " ".join(_NOISE.sub("", hardware).split()) or hardware
    return words if len(words) <= LONGEST_HARDWARE else words[: LONGEST_HARDWARE - 1] + "…"


def _badge_svg(name: str, words: str, *, valid: bool) -> str:
    left, right = (round(LETTER * len(text) + 2 * AROUND) for text in (name, words))
    colour = "#0a6847" if valid else "#a3211a"
    label = escape(f"{name}: {words}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{label}">'
        f"<title>{label}</title>"
        f'<rect width="{left + right}" height="20" rx="3" fill="#12161f"/>'
        f'<path fill="{colour}" d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z"/>'
        f'<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        f'<text x="{left / 2}" y="14">{escape(name)}</text><text x="{left + right / 2}" y="14">{escape(words)}</text>'
        "</g></svg>"
    )


WIDTH, HEIGHT = 1200, 630
LEFT, ROOM = 80.0, 1040.0
INK, SOFT, GROUND, FILL, GOOD, BAD = "#e7eaf0", "#a4adbc", "#0e1117", "#4b94dd", "#6bd3a8", "#ff9c92"


@router.get("/results/{id}/image.png")
def read_image(service: ServiceDep, _: Reader, result_id: Id) -> Response:
    """The SVG as PNG: who shows shared addresses shows no SVG."""
    with service.database.read() as session:
        document = current(results.get(session, result_id))
        baseline = leaderboard.baseline_of(session, result_id)
    words = badge_words(document, None if baseline is None else baseline.value)
    picture = png(_picture_svg(document, words))
    return Response(picture, media_type="image/png", headers={"Cache-Control": f"public, max-age={KEPT_S}"})


def _picture_svg(document: Document, words: str) -> str:
    primary = primary_of(document)
    valid = document["verdict"]["valid"]
    unit = metric_heading(document["variant"]["primary_metric"])
    return element(
        "svg",
        element("rect", width=WIDTH, height=HEIGHT, fill=GROUND),
        _picture_line("OptiGPU", 90, 30, SOFT),
        _picture_line(
            document["variant"]["label"], 190, _size_of(document["variant"]["label"]), INK, bold=True
        ),
        _picture_line(variant_line(document["variant"]), 250, 30, SOFT),
        _picture_line(f"{primary.figure.text} {primary.figure.spread} {unit}", 390, 84, INK, bold=True),
        *_interval(primary.summary),
        _picture_line(
            words if valid else "not valid: it is not ranked", 530, 40, GOOD if valid else BAD, bold=True
        ),
        _picture_line(document["environment"]["hardware_class"], 580, 26, SOFT),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        font_family=FAMILY,
    )


def _picture_line(words: str, y: float, size: float, colour: str, *, bold: bool = False) -> str:
    shown = shortened(words, ROOM, size * 1.08 if bold else size)
    inner = text(LEFT, y, shown)
    return element("g", inner, fill=colour, font_size=size, font_weight="bold" if bold else None)


def _size_of(label: str) -> float:
    """Smaller letters for a long name."""
    return next((size for size in (54.0, 44.0) if text_width(label, 1.08 * size) <= ROOM), 34.0)


def _interval(summary: Document) -> list[str]:
    """A bar from 0 with its whiskers; nothing without a figure."""
    value, ci = summary.get("value"), summary.get("ci")
    if not value or value < 0:
        return []
    most = max(ci[1] if ci else value, value)
    bar = element("rect", x=LEFT, y=430, width=ROOM * value / most, height=20, fill=FILL)
    if not ci:
        return [bar]
    low, high = (LEFT + ROOM * max(0.0, bound) / most for bound in ci)
    path = f"M{low:.1f} 440H{high:.1f}M{low:.1f} 424V456M{high:.1f} 424V456"
    return [bar, element("path", d=path, stroke=INK, stroke_width=4, fill="none")]
