"""Points of a series joined in the order of x, for example throughput over the 95th percentile of the latency."""

from collections.abc import Sequence
from itertools import pairwise

from optigpu.report.charts.marks import Mark, Panel
from optigpu.report.charts.svg.markup import Link, Svg, path
from optigpu.report.charts.svg.places import Box
from optigpu.report.charts.svg.plane import Extent, Plane
from optigpu.report.charts.svg.points import Behind, Look, along, bounds, drawn, series_of, x_bounds
from optigpu.report.charts.svg.shapes import SERIES


def svg(panel: Panel, *, id_prefix: str, link: Link | None = None) -> Svg:
    """A line for each series. Both axes are logarithmic where the panel is. `link` makes points links."""
    is_joined = len(series_of(panel)) < len(panel.marks)

    def look(marks: Sequence[Mark]) -> Look:
        xs, ys = [each.x or 0.0 for each in marks], [each.value for each in marks]
        logarithmic = panel.logarithmic and min(*xs, *ys) > 0
        return Look(
            x=Extent(tuple(xs), tuple(x_bounds(marks)), logarithmic),
            y=Extent(tuple(ys), tuple(bounds(marks)), logarithmic),
            behind=lambda plane: _joined(plane, marks, panel),
            name=lambda each: each.text if is_joined else each.label,
        )

    return drawn(panel, look, id_prefix=id_prefix, link=link)


def _joined(plane: Plane, marks: Sequence[Mark], panel: Panel) -> Behind:
    parts: list[Svg] = []
    soft: list[Box] = []
    for number, name in enumerate(each for each in series_of(panel) if each):
        own = sorted((each for each in marks if each.series == name), key=lambda each: each.x or 0.0)
        places = [plane.at(each.x or 0.0, each.value) for each in own]
        parts.append(path(places, f"c-line c-s{number % SERIES + 1} c-l{number % SERIES + 1}"))
        soft += [along(*pair) for pair in pairwise(places)]
    return Behind(tuple(parts), soft=tuple(soft))
