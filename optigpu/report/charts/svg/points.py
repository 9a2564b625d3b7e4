"""Points on two axes with their intervals as crosses, each named where there is room."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from optigpu.report.charts.marks import Mark, Panel
from optigpu.report.charts.svg.axes import LINE
from optigpu.report.charts.svg.key import key
from optigpu.report.charts.svg.markup import (
    Drawing,
    Frame,
    Link,
    Svg,
    chart,
    group,
    linked,
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
from optigpu.report.charts.svg.words import SMALL, TAIL, shortened, text_width, wrapped
from optigpu.report.numbers import short
from optigpu.vocabulary import Better

MOST_POINTS = 80
MOST_LINES = 4
"""Of what is said below the plot."""
LONGEST_LABEL, LONGEST_NARROW = 210.0, 135.0


@dataclass(frozen=True)
class Behind:
    """What lies behind the points, and what is said below the plot.

    No label lies on `solid` boxes, and on `soft` ones as little as it can.
    """

    parts: tuple[str, ...] = ()
    below: str = ""
    solid: tuple[Box, ...] = ()
    soft: tuple[Box, ...] = ()


@dataclass(frozen=True)
class Look:
    """How the points of a chart are drawn: their axes, what is behind them, how they are named, and which are faint."""

    x: Extent
    y: Extent
    behind: Callable[[Plane], Behind]
    name: Callable[[Mark], str]
    faint: Callable[[Mark], bool] = lambda _: False


def drawn(panel: Panel, look: Callable[[Sequence[Mark]], Look], *, id_prefix: str, link: Link | None) -> Svg:
    """The marks that have both values; of many, those on the front and then the first.

    Where each mark is a series of its own, labels name them, and not a key.
    """
    if len(series_of(panel)) == len(panel.marks):
        plain = tuple(each.model_copy(update={"series": ""}) for each in panel.marks)
        panel = panel.model_copy(update={"marks": plain})
    marks = tuple(each for each in panel.marks if drawable(each.value, each.x))
    if not marks:
        return sentence(nothing(panel))
    shown = tuple(sorted(marks, key=lambda each: not each.on_front)[:MOST_POINTS])
    how = look(shown)
    return chart(
        lambda frame: _Points(frame, panel, shown, link, how).drawing(len(marks) - len(shown)),
        heading=panel.title,
        description=spoken(panel, shown),
        id_prefix=id_prefix,
    )


def bounds(marks: Sequence[Mark]) -> list[float]:
    """The ends of the intervals of the values."""
    return [bound for each in marks for bound in each.ci or ()]


def x_bounds(marks: Sequence[Mark]) -> list[float]:
    return [bound for each in marks for bound in each.x_ci or ()]


def series_of(panel: Panel) -> list[str]:
    return list(dict.fromkeys(each.series for each in panel.marks))


@dataclass(frozen=True)
class _Points:
    frame: Frame
    panel: Panel
    marks: tuple[Mark, ...]
    link: Link | None
    look: Look

    def drawing(self, left_out: int) -> Drawing:
        series = [each for each in series_of(self.panel) if each]
        legend, high = key(series, self.frame.width, 0.0)
        names = (self.panel.x_axis, self.panel.axis)
        plane = Plane.fitted(self.frame, self.look.x, self.look.y, names, top=high + LINE + 8)
        behind = self.look.behind(plane)
        labels = self._labels(plane, behind)
        parts = [
            legend,
            *plane.axes(y_name_at=high + 11),
            self._better(high + 11),
            *behind.parts,
            group("c-crosses", *(self._cross(each, plane) for each in self.marks), hidden=True),
            group("c-places", *self._points(plane, series, labels)),
        ]
        more = f"{left_out} more are in the table." if left_out else ""
        said = wrapped(" ".join(filter(None, [behind.below, more])), self.frame.width, MOST_LINES, SMALL)
        lines = [words for words in said if words]
        for number, words in enumerate(lines):
            parts.append(text(0, plane.height + LINE * number + 11, words, class_="c-faint"))
        return Drawing(plane.height + LINE * len(lines), tuple(parts))

    def _better(self, y: float) -> Svg:
        """Which way is better, beside the name of the upright axis."""
        up = self.panel.better is Better.HIGHER
        arrows = {(True, True): "↖", (True, False): "↗", (False, True): "↙", (False, False): "↘"}
        arrow = arrows[up, self.panel.x_better is Better.LOWER]
        return text(self.frame.width, y, f"{arrow} better", class_="c-faint", anchor="end")

    def _cross(self, each: Mark, plane: Plane) -> Svg:
        x, y = plane.at(each.x or 0.0, each.value)
        across = whisker(each.x_ci, plane.x, y, cap=3)
        return Svg(whisker(each.ci, plane.y, x, upright=True, cap=3) + across)

    def _labels(self, plane: Plane, behind: Behind) -> list[Svg]:
        """A label for each mark, empty where it finds no room; those on the front come first."""
        longest = LONGEST_NARROW if self.frame.is_narrow else LONGEST_LABEL
        texts = [shortened(self.look.name(each), longest, SMALL, tail=TAIL) for each in self.marks]
        places = [plane.at(each.x or 0.0, each.value) for each in self.marks]
        order = sorted(range(len(texts)), key=lambda number: not self.marks[number].on_front)
        wanted = [Wanted(*places[n], text_width(texts[n], SMALL) + 2, SMALL + 2) for n in order]
        solid = [*(around(x, y, RADIUS + 1) for x, y in places), *behind.solid]
        soft = [*(box for each in self.marks for box in _cross_boxes(each, plane)), *behind.soft]
        found = dict(zip(order, placed(wanted, plane.box, solid, soft), strict=True))
        return [_label(words, found[number]) for number, words in enumerate(texts)]

    def _points(self, plane: Plane, series: list[str], labels: list[Svg]) -> Iterator[Svg]:
        """Each as its series is drawn in the key."""
        for each, label in zip(self.marks, labels, strict=True):
            yield self._point(each, series.index(each.series) if each.series else 0, plane, label)

    def _point(self, each: Mark, number: int, plane: Plane, label: Svg) -> Svg:
        x, y = plane.at(each.x or 0.0, each.value)
        said = f"{each.label}: {short(each.value)} {self.panel.axis}, {short(each.x)} {self.panel.x_axis}"
        if each.text and each.text != each.label:
            said = f"{said}; {each.text}"
        faint = self.look.faint(each)
        shape = point(x, y, number, valid=each.valid, faint=faint)
        return group(
            "c-off" if faint else None, linked(self.link, each.source, said, title(said), shape, label)
        )


def _cross_boxes(each: Mark, plane: Plane) -> list[Box]:
    """What a cross covers."""
    x, y = plane.at(each.x or 0.0, each.value)
    boxes: list[Box] = []
    if each.ci and drawable(*each.ci):
        boxes.append(Box(x - 3, plane.y(each.ci[1]), x + 3, plane.y(each.ci[0])))
    if each.x_ci and drawable(*each.x_ci):
        boxes.append(Box(plane.x(each.x_ci[0]), y - 3, plane.x(each.x_ci[1]), y + 3))
    return boxes


def along(before: tuple[float, float], after: tuple[float, float]) -> Box:
    """What a line between two places covers."""
    (x1, x2), (y1, y2) = sorted((before[0], after[0])), sorted((before[1], after[1]))
    return Box(x1 - 3, y1 - 3, x2 + 3, y2 + 3)


def _label(words: str, box: Box | None) -> Svg:
    return Svg("") if box is None or not words else text(box.left + 1, box.bottom - 3.5, words)
