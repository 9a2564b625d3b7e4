"""Points on two axes with their intervals as crosses, each named where there is room: joined in the order of x, with
their front as steps, or below the roofs that the machine measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from optigpu.report.charts.marks import GOAL_PERCENT, Form, Mark, Panel, Roof
from optigpu.report.charts.svg.bars import nothing, spoken
from optigpu.report.charts.svg.labels import Box, Wanted, around, placed
from optigpu.report.charts.svg.markup import (
    SMALL,
    TAIL,
    Drawing,
    Frame,
    Link,
    Sketch,
    Svg,
    group,
    line,
    linked,
    path,
    shortened,
    text,
    text_width,
    title,
    wrapped,
)
from optigpu.report.charts.svg.plane import (
    LINE,
    RADIUS,
    SERIES,
    SMALLEST,
    Extent,
    Plane,
    drawable,
    key,
    point,
    whisker,
)
from optigpu.report.formats import short
from optigpu.vocabulary import Better

MOST_POINTS = 80
MOST_LINES = 4
"""Of what is said below the plot."""
LONGEST_LABEL, LONGEST_NARROW = 210.0, 135.0


@dataclass(frozen=True)
class Behind:
    """What lies behind the points, and what is said below the plot. No label lies on `solid` boxes, and on `soft` ones
    as little as it can."""

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


def drawn(panel: Panel, look: Callable[[Sequence[Mark]], Look], link: Link | None) -> Sketch | str:
    """The marks that have both values, those on the front first; of many, a page shows the first. Where each mark is a
    series of its own or none is of any, labels name them on a page; a file has a key of all."""
    marks = [each for each in panel.marks if drawable(each.value, each.x)]
    if not marks:
        return nothing(panel)
    marks.sort(key=lambda each: not each.on_front)
    series = series_of(panel)
    is_own = len(series) == len(panel.marks) or not any(series)

    def draw(frame: Frame) -> Drawing:
        shown = marks if frame.alone else marks[:MOST_POINTS]
        if is_own:
            shown = [each.model_copy(update={"series": each.label if frame.alone else ""}) for each in shown]
        points = _Points(frame, panel, tuple(shown), link, look(shown), is_own)
        return points.drawing(len(marks) - len(shown))

    return Sketch(panel.title, spoken(panel, marks), draw)


def bounds(marks: Sequence[Mark]) -> list[float]:
    """The ends of the intervals of the values."""
    return [bound for each in marks for bound in each.ci or ()]


def x_bounds(marks: Sequence[Mark]) -> list[float]:
    return [bound for each in marks for bound in each.x_ci or ()]


def series_of(panel: Panel) -> list[str]:
    return list(dict.fromkeys(each.series for each in panel.marks))


ARROWS = {
    (Better.HIGHER, Better.LOWER): "↖",
    (Better.HIGHER, Better.HIGHER): "↗",
    (Better.LOWER, Better.LOWER): "↙",
    (Better.LOWER, Better.HIGHER): "↘",
}
"""Which way is better: that of y, and that of x."""


@dataclass(frozen=True)
class _Points:
    frame: Frame
    panel: Panel
    marks: tuple[Mark, ...]
    link: Link | None
    look: Look
    is_own: bool

    def drawing(self, left_out: int) -> Drawing:
        series = list(dict.fromkeys(each.series for each in self.marks if each.series))
        # where each point is a series, with what else is said of it
        more = {each.series: each.text for each in self.marks if self.is_own and each.text != each.label}
        named = [f"{name}: {more[name]}" if more.get(name) else name for name in series]
        legend, high = key(named, self.frame.width, least=1 if self.frame.alone else 2)
        names = (self.panel.x_axis, self.panel.axis)
        plane = Plane.fitted(self.frame, self.look.x, self.look.y, names, top=high + LINE + 8)
        behind = self.look.behind(plane)
        labels = self._labels(plane, behind)
        better = f"{ARROWS[self.panel.better, self.panel.x_better]} better"
        places = (
            # as its series is drawn in the key
            self._point(each, series.index(each.series) if each.series else 0, plane, label)
            for each, label in zip(self.marks, labels, strict=True)
        )
        parts = [
            legend,
            *plane.axes(y_name_at=high + 11),
            text(self.frame.width, high + 11, better, class_="c-faint", anchor="end"),
            *behind.parts,
            group("c-crosses", *self._crosses(plane), hidden=True),
            group("c-places", *places),
        ]
        left = f"{left_out} more are in the table." if left_out else ""
        said = wrapped(" ".join(filter(None, [behind.below, left])), self.frame.width, MOST_LINES, SMALL)
        lines = [words for words in said if words]
        for number, words in enumerate(lines):
            parts.append(text(0, plane.height + LINE * number + 11, words, class_="c-faint"))
        return Drawing(plane.height + LINE * len(lines), tuple(parts))

    def _crosses(self, plane: Plane) -> Iterator[Svg]:
        for each in self.marks:
            x, y = plane.at(each.x or 0.0, each.value)
            yield whisker(each.ci, plane.y, x, upright=True, cap=3)
            yield whisker(each.x_ci, plane.x, y, cap=3)

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
        return [
            text(box.left + 1, box.bottom - 3.5, words) if (box := found[number]) and words else Svg("")
            for number, words in enumerate(texts)
        ]

    def _point(self, each: Mark, number: int, plane: Plane, label: Svg) -> Svg:
        x, y = plane.at(each.x or 0.0, each.value)
        said = f"{each.label}: {short(each.value)} {self.panel.axis}, {short(each.x)} {self.panel.x_axis}"
        if each.text and each.text != each.label:
            said = f"{said}; {each.text}"
        faint = self.look.faint(each)
        shape = point(x, y, number, valid=each.valid, faint=faint)
        whole = linked(self.link, each.source, said, title(said), shape, label)
        return group("c-off" if faint else None, whole)


def _cross_boxes(each: Mark, plane: Plane) -> Iterator[Box]:
    """What a cross covers."""
    x, y = plane.at(each.x or 0.0, each.value)
    if each.ci and drawable(*each.ci):
        yield Box(x - 3, plane.y(each.ci[1]), x + 3, plane.y(each.ci[0]))
    if each.x_ci and drawable(*each.x_ci):
        yield Box(plane.x(each.x_ci[0]), y - 3, plane.x(each.x_ci[1]), y + 3)


def along(places: Sequence[tuple[float, float]]) -> tuple[Box, ...]:
    """What the lines between places cover."""
    return tuple(
        Box(min(x1, x2) - 3, min(y1, y2) - 3, max(x1, x2) + 3, max(y1, y2) + 3)
        for (x1, y1), (x2, y2) in pairwise(places)
    )


def lines(panel: Panel, link: Link | None = None) -> Sketch | str:
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

    return drawn(panel, look, link)


def _joined(plane: Plane, marks: Sequence[Mark], panel: Panel) -> Behind:
    parts: list[Svg] = []
    soft: list[Box] = []
    for place, name in enumerate(each for each in series_of(panel) if each):
        own = sorted((each.x or 0.0, each.value) for each in marks if each.series == name)
        places = [plane.at(*each) for each in own]
        number = place % SERIES + 1
        parts.append(path(places, f"c-line c-s{number} c-l{number}"))
        soft += along(places)
    return Behind(tuple(parts), soft=tuple(soft))


FLOOR = 1e-5
"""A divergence that is less is as good as none: a logarithmic axis ends there."""


def fronts(panel: Panel, link: Link | None = None) -> Sketch | str:
    """A point for each mark that has both values. `link` makes points links to their results."""

    def behind(plane: Plane, marks: Sequence[Mark]) -> Behind:
        if panel.form is Form.LOSS:
            return _goal(plane)
        corners = [plane.at(x, y) for x, y in steps(marks, panel)]
        return Behind((path(corners, "c-front"),), soft=along(corners)) if len(corners) > 1 else Behind()

    def look(marks: Sequence[Mark]) -> Look:
        floor = FLOOR if panel.logarithmic else None
        goal = [GOAL_PERCENT] if panel.form is Form.LOSS else []
        y = Extent.of([each.value for each in marks], bounds(marks))
        if panel.logarithmic_values and min(y.values) > 0:
            y = replace(y, logarithmic=True)
        return Look(
            x=Extent.of([*(each.x or 0.0 for each in marks), *goal], x_bounds(marks), floor=floor),
            y=y,
            behind=lambda plane: behind(plane, marks),
            name=lambda each: each.label,
            faint=lambda each: panel.form is Form.FRONT and not each.on_front,
        )

    return drawn(panel, look, link)


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
