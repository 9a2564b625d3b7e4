"""The key of the series of a chart, in as many rows as they need."""

from collections.abc import Sequence

from optigpu.report.charts.svg.axes import LINE
from optigpu.report.charts.svg.markup import Svg, group, text
from optigpu.report.charts.svg.shapes import point
from optigpu.report.charts.svg.words import SMALL, TAIL, shortened, text_width

MARK, GAP = 17.0, 16.0


def key(names: Sequence[str], width: float, y: float) -> tuple[Svg, float]:
    """Each name after its point, from `y` down, and how high that is; nothing for fewer than two names."""
    if len(names) < 2:
        return Svg(""), 0.0
    parts: list[str] = []
    x, row = 0.0, 0
    for number, name in enumerate(names):
        shown = shortened(name, width - MARK, SMALL, tail=TAIL)
        wide = MARK + text_width(shown, SMALL)
        if x and x + wide > width:
            x, row = 0.0, row + 1
        middle = y + LINE * row + LINE / 2
        parts += [point(x + 7, middle, number), text(x + MARK, middle + 4, shown)]
        x += wide + GAP
    return group("c-key", *parts), LINE * (row + 1) + 4
