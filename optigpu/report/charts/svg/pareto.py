"""Points with their intervals, and the front as steps.

For speed over bytes, over divergence, over price or energy, and for quality over bytes: any panel of the form `front`
or `loss`.
"""

from collections.abc import Sequence
from itertools import pairwise

from optigpu.report.charts.marks import Form, Mark, Panel
from optigpu.report.charts.quality import GOAL_PERCENT
from optigpu.report.charts.svg.markup import Link, Svg, group, line, path, text
from optigpu.report.charts.svg.places import Box
from optigpu.report.charts.svg.plane import Extent, Plane
from optigpu.report.charts.svg.points import Behind, Look, along, bounds, drawn, x_bounds
from optigpu.report.charts.svg.words import SMALL, shortened, text_width
from optigpu.vocabulary import Better

FLOOR = 1e-5
"""A divergence that is less is as good as none: a logarithmic axis ends there."""


def svg(panel: Panel, *, id_prefix: str, link: Link | None = None) -> Svg:
    """A point for each mark that has both values. `link` makes points links to their results."""

    def look(marks: Sequence[Mark]) -> Look:
        floor = FLOOR if panel.logarithmic else None
        return Look(
            x=Extent.of([each.x or 0.0 for each in marks], x_bounds(marks), floor=floor),
            y=Extent.of([each.value for each in marks], bounds(marks)),
            behind=lambda plane: _goal(plane) if panel.form is Form.LOSS else _front(plane, marks, panel),
            name=lambda each: each.label,
            faint=lambda each: panel.form is Form.FRONT and not each.on_front,
        )

    return drawn(panel, look, id_prefix=id_prefix, link=link)


def _front(plane: Plane, marks: Sequence[Mark], panel: Panel) -> Behind:
    corners = [plane.at(x, y) for x, y in steps(marks, panel)]
    if len(corners) < 2:
        return Behind()
    return Behind((path(corners, "c-front"),), soft=tuple(along(*pair) for pair in pairwise(corners)))


def steps(marks: Sequence[Mark], panel: Panel) -> list[tuple[float, float]]:
    """The corners of the front: through the marks on it that are the best by their values, from the best x on."""
    sign = 1 if panel.better is Better.HIGHER else -1
    from_best = sorted(
        ((each.x or 0.0, each.value) for each in marks if each.on_front),
        key=lambda place: (place[0] if panel.x_better is Better.LOWER else -place[0], -sign * place[1]),
    )
    corners: list[tuple[float, float]] = []
    for x, y in from_best:
        if corners and sign * y <= sign * corners[-1][1]:
            continue
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return corners


def _goal(plane: Plane) -> Behind:
    """The founding goal, in a panel of a loss."""
    if not plane.x.holds(GOAL_PERCENT):
        return Behind()
    x = plane.x(GOAL_PERCENT)
    words = shortened(f"goal: at most {GOAL_PERCENT:g}% lost", plane.x.end - x - 6, SMALL)
    box = Box(x + 4, plane.bottom - 18, x + 6 + text_width(words, SMALL), plane.bottom - 3)
    parts = (line(x, plane.top, x, plane.bottom), text(x + 5, plane.bottom - 6, words))
    return Behind((group("c-goal", *parts),), solid=(box,))
