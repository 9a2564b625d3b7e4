"""Operations per second over operations per byte, below the roofs that the machine measured, on logarithmic axes."""

from collections.abc import Iterator, Sequence

from optigpu.report.charts.marks import Mark, Panel, Roof
from optigpu.report.charts.svg.axes import SMALLEST, drawable
from optigpu.report.charts.svg.markup import (
    SMALL,
    Link,
    Sketch,
    group,
    line,
    path,
    shortened,
    text,
    text_width,
)
from optigpu.report.charts.svg.plane import Box, Extent, Plane
from optigpu.report.charts.svg.points import Behind, Look, along, bounds, drawn

BEYOND = 3.0
"""An axis goes on so many times beyond the last knee, so that the flat part of a roof is seen."""
PIECES = 24
Line = tuple[tuple[float, float], tuple[float, float]]


def roofline(panel: Panel, link: Link | None = None) -> Sketch | str:
    """A point for each mark, a slope for each bandwidth and a ceiling for each rate. `link` makes points links."""
    roofs = [
        Roof(
            text=each.text,
            gb_per_s=each.gb_per_s if _is_above(each.gb_per_s) else None,
            gflop_per_s=each.gflop_per_s if _is_above(each.gflop_per_s) else None,
        )
        for each in panel.roofs
    ]
    placed = tuple(each for each in panel.marks if _is_above(each.value) and _is_above(each.x))
    rates = [each.gflop_per_s for each in roofs if each.gflop_per_s]
    # FLOP/byte at which each bandwidth meets the highest rate
    knees = [max(rates) / each.gb_per_s for each in roofs if rates and each.gb_per_s]

    def look(marks: Sequence[Mark]) -> Look:
        limits = [each.limit for each in marks if _is_above(each.limit)]
        xs = [each.x or 0.0 for each in marks] + [knee * BEYOND for knee in knees]
        ys = [each.value for each in marks] + [each * 1.3 for each in (*limits, *rates) if each]
        return Look(
            x=Extent(tuple(xs), (), logarithmic=True),
            y=Extent(tuple(ys), tuple(bounds(marks)), logarithmic=True),
            behind=lambda plane: _roofs(plane, roofs, marks),
            name=lambda each: each.label,
        )

    return drawn(panel.model_copy(update={"marks": placed}), look, link)


def _is_above(value: float | None) -> bool:
    return value is not None and drawable(value) and value > SMALLEST


def _roofs(plane: Plane, roofs: Sequence[Roof], marks: Sequence[Mark]) -> Behind:
    """Ceilings are named above their right end, slopes below the plot: they lie close together."""
    parts: list[str] = []
    for each in marks:  # a line from a point up to what its roof allows
        if each.limit is not None and _is_above(each.limit):
            x, y = plane.at(each.x or 0.0, each.value)
            parts.append(line(x, y, x, plane.y(each.limit), "c-limit"))
    taken: list[Box] = []
    soft: list[Box] = []
    for roof, ends in _lines(plane, roofs):
        (x1, y1), (x2, y2) = plane.at(*ends[0]), plane.at(*ends[1])
        parts.append(path(((x1, y1), (x2, y2)), "c-roof"))
        shares = [piece / PIECES for piece in range(PIECES + 1)]  # small boxes, since it may slant
        soft += along([(x1 + share * (x2 - x1), y1 + share * (y2 - y1)) for share in shares])
        words = shortened(roof.text, plane.x.end - plane.x.start, SMALL)
        box = Box(x2 - text_width(words, SMALL), y2 - 16, x2, y2 - 2)
        if roof.gflop_per_s and plane.box.holds(box) and not box.meets_any(taken):
            taken.append(box)
            parts.append(text(x2, y2 - 6, words, anchor="end"))
    slopes = sorted((each for each in roofs if each.gb_per_s), key=lambda each: -(each.gb_per_s or 0.0))
    below = f"Slopes, from the left: {'; '.join(each.text for each in slopes)}." if slopes else ""
    return Behind((group("c-roof", *parts),), below, tuple(taken), tuple(soft))


def _lines(plane: Plane, roofs: Sequence[Roof]) -> Iterator[tuple[Roof, Line]]:
    """Each roof within the plot: ceilings from the steepest slope on, slopes up to the highest ceiling."""
    (left, right), (bottom, top) = (plane.x.low, plane.x.high), (plane.y.low, plane.y.high)
    rates = [each.gflop_per_s for each in roofs if each.gflop_per_s]
    steepest = max((each.gb_per_s for each in roofs if each.gb_per_s), default=None)
    highest = min(top, max(rates, default=top))
    for each in roofs:
        if each.gflop_per_s and bottom <= each.gflop_per_s <= top:
            begin = max(left, each.gflop_per_s / steepest) if steepest else left
            if begin < right:
                yield each, ((begin, each.gflop_per_s), (right, each.gflop_per_s))
        elif each.gb_per_s:
            begin, end = max(left, bottom / each.gb_per_s), min(right, highest / each.gb_per_s)
            if begin < end:
                yield each, ((begin, begin * each.gb_per_s), (end, end * each.gb_per_s))
