"""Points with their intervals as crosses, named where there is room, and the front as steps.

For speed over bytes, over divergence, over price or energy, and for quality over bytes: any panel of the form `front`
or `loss`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from optigpu.report.charts.marks import Form, Mark, Panel
from optigpu.report.charts.quality import GOAL_PERCENT
from optigpu.report.charts.svg.axes import LINE
from optigpu.report.charts.svg.key import key
from optigpu.report.charts.svg.markup import (
    Drawing,
    Frame,
    Link,
    Svg,
    chart,
    group,
    line,
    linked,
    path,
    sentence,
    text,
    title,
)
from optigpu.report.charts.svg.places import Box, Wanted, around, placed
from optigpu.report.charts.svg.plane import Extent, Plane
from optigpu.report.charts.svg.said import nothing, spoken
from optigpu.report.charts.svg.scales import drawable
from optigpu.report.charts.svg.shapes import RADIUS, point
from optigpu.report.charts.svg.whiskers import whisker
from optigpu.report.charts.svg.words import SMALL, shortened, text_width
from optigpu.report.numbers import short
from optigpu.vocabulary import Better

MOST_POINTS = 80
FLOOR = 1e-5
"""A divergence that is less is as good as none: a logarithmic axis ends there."""
LONGEST_LABEL = 210.0


def svg(panel: Panel, *, id_prefix: str, link: Link | None = None) -> Svg:
    """A point for each mark that has both values. `link` makes points links to their results."""
    marks = tuple(each for each in panel.marks if drawable(each.value, each.x))
    if not marks:
        return sentence(nothing(panel))
    first = sorted(marks, key=lambda each: not each.on_front)[:MOST_POINTS]
    return chart(
        lambda frame: _Points(frame, panel, tuple(first), link).drawing(len(marks) - len(first)),
        heading=panel.title,
        description=spoken(panel, first),
        id_prefix=id_prefix,
    )


def steps(marks: Sequence[Mark], panel: Panel) -> list[tuple[float, float]]:
    """The corners of the front: through the marks on it that are the best by their values, from the least x on."""
    sign = 1 if panel.better is Better.HIGHER else -1
    from_best = sorted(
        ((each.x or 0.0, each.value) for each in marks if each.on_front),
        key=lambda place: (place[0] if panel.x_better is Better.LOWER else -place[0], -sign * place[1]),
    )
    best: list[tuple[float, float]] = []
    for x, y in from_best:
        if not best or sign * y > sign * best[-1][1]:
            best.append((x, y))
    corners: list[tuple[float, float]] = []
    for place in best:
        if corners:
            corners.append((place[0], corners[-1][1]))
        corners.append(place)
    return corners


@dataclass(frozen=True)
class _Points:
    frame: Frame
    panel: Panel
    marks: tuple[Mark, ...]
    link: Link | None

    def drawing(self, left_out: int) -> Drawing:
        legend, high = key([each for each in self._series if each], self.frame.width, 0.0)
        plane = self._plane(high)
        goal, covered = self._goal(plane)
        labels = self._labels(plane, covered)
        front = steps(self.marks, self.panel)
        parts = [
            legend,
            *plane.axes(y_name_at=high + 11),
            self._better(plane, high + 11),
            goal,
            path((plane.at(x, y) for x, y in front), "c-front") if len(front) > 1 else "",
            group("c-crosses", *(self._cross(each, plane) for each in self.marks), hidden=True),
            group(
                "c-places",
                *(self._point(each, plane, label) for each, label in zip(self.marks, labels, strict=True)),
            ),
        ]
        height = plane.height
        if left_out:
            height += LINE
            parts.append(text(0, height - 5, f"{left_out} more are in the table.", class_="c-faint"))
        return Drawing(height, tuple(parts))

    @property
    def _series(self) -> list[str]:
        return list(dict.fromkeys(each.series for each in self.panel.marks))

    def _plane(self, key_height: float) -> Plane:
        xs = [each.x or 0.0 for each in self.marks]
        x_bounds = [bound for each in self.marks for bound in each.x_ci or ()]
        x = Extent.of(xs, x_bounds, floor=FLOOR if self.panel.logarithmic else None)
        y = Extent.of([each.value for each in self.marks], [b for each in self.marks for b in each.ci or ()])
        names = (self.panel.x_axis, self.panel.axis)
        return Plane.fitted(self.frame, x, y, names, top=key_height + LINE + 8)

    def _cross(self, each: Mark, plane: Plane) -> Svg:
        x, y = plane.at(each.x or 0.0, each.value)
        across = whisker(each.x_ci, plane.x, y, cap=3)
        return Svg(whisker(each.ci, plane.y, x, upright=True, cap=3) + across)

    def _labels(self, plane: Plane, covered: Sequence[Box]) -> list[Svg]:
        """A label for each mark, empty where it finds no room; those on the front come first."""
        texts = [self._words(each) for each in self.marks]
        places = [plane.at(each.x or 0.0, each.value) for each in self.marks]
        order = sorted(range(len(texts)), key=lambda number: not self.marks[number].on_front)
        wanted = [Wanted(*places[n], text_width(texts[n], SMALL) + 2, SMALL + 2) for n in order]
        points = [around(x, y, RADIUS + 1) for x, y in places]
        lines = [box for each in self.marks for box in self._lines(each, plane)]
        front = [plane.at(x, y) for x, y in steps(self.marks, self.panel)]
        lines += [_along(before, after) for before, after in pairwise(front)]
        found = dict(zip(order, placed(wanted, plane.box, [*points, *covered], lines), strict=True))
        return [_label(words, found[number]) for number, words in enumerate(texts)]

    def _words(self, each: Mark) -> str:
        """What the label says: not the series again, which the key and the colour say."""
        return shortened(each.label, LONGEST_LABEL * (0.65 if self.frame.is_narrow else 1.0), SMALL)

    def _lines(self, each: Mark, plane: Plane) -> list[Box]:
        """The boxes that a cross covers."""
        x, y = plane.at(each.x or 0.0, each.value)
        boxes: list[Box] = []
        if each.ci and drawable(*each.ci):
            boxes.append(Box(x - 3, plane.y(each.ci[1]), x + 3, plane.y(each.ci[0])))
        if each.x_ci and drawable(*each.x_ci):
            boxes.append(Box(plane.x(each.x_ci[0]), y - 3, plane.x(each.x_ci[1]), y + 3))
        return boxes

    def _point(self, each: Mark, plane: Plane, label: Svg) -> Svg:
        x, y = plane.at(each.x or 0.0, each.value)
        said = f"{each.label}: {short(each.value)} {self.panel.axis}, {short(each.x)} {self.panel.x_axis}"
        is_off = self.panel.form is Form.FRONT and not each.on_front
        series = self._series.index(each.series)
        drawn = point(x, y, series, valid=each.valid, faint=is_off)
        return group(
            "c-off" if is_off else None, linked(self.link, each.source, said, title(said), drawn, label)
        )

    def _better(self, plane: Plane, y: float) -> Svg:
        """Which way is better, beside the name of the upright axis."""
        up = self.panel.better is Better.HIGHER
        arrows = {(True, True): "↖", (True, False): "↗", (False, True): "↙", (False, False): "↘"}
        arrow = arrows[up, self.panel.x_better is Better.LOWER]
        return text(self.frame.width, y, f"{arrow} better", class_="c-faint", anchor="end")

    def _goal(self, plane: Plane) -> tuple[str, list[Box]]:
        """The founding goal, in a panel of a loss, and what its name covers."""
        if self.panel.form is not Form.LOSS or not plane.x.holds(GOAL_PERCENT):
            return "", []
        x = plane.x(GOAL_PERCENT)
        words = shortened(f"goal: at most {GOAL_PERCENT:g}% lost", plane.x.end - x - 6, SMALL)
        box = Box(x + 4, plane.bottom - 18, x + 6 + text_width(words, SMALL), plane.bottom - 3)
        drawn = (line(x, plane.top, x, plane.bottom), text(x + 5, plane.bottom - 6, words))
        return group("c-goal", *drawn), [box]


def _along(before: tuple[float, float], after: tuple[float, float]) -> Box:
    """The box of a step of the front."""
    (x1, x2), (y1, y2) = sorted((before[0], after[0])), sorted((before[1], after[1]))
    return Box(x1 - 3, y1 - 3, x2 + 3, y2 + 3)


def _label(words: str, box: Box | None) -> Svg:
    return Svg("") if box is None or not words else text(box.left + 1, box.bottom - 3.5, words)
