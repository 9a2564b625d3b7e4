"""The lines and labels of axes; and a plot with two of them: where its edges are, and its lines, labels and names."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from optigpu.report.charts.marks import Interval
from optigpu.report.charts.svg.labels import Box
from optigpu.report.charts.svg.markup import (
    SIZE,
    SMALL,
    TAIL,
    Frame,
    Svg,
    element,
    group,
    line,
    number,
    shortened,
    text,
    text_width,
)
from optigpu.report.formats import prefixed, superscript

LARGEST = 1e30
"""What is beyond is not drawn: differences of larger numbers overflow."""
SMALLEST = 1e-30
"""What is below is drawn as 0."""
LOGARITHMIC_FROM = 30
"""An axis is logarithmic where the largest value is so many times the smallest: less would lie on a line."""
GAP = 10.0
"""Between two labels of an axis."""


def drawable(*values: float | None) -> bool:
    """Whether all are numbers that a page can hold."""
    return all(value is not None and -LARGEST <= value <= LARGEST for value in values)  # as NaN is not


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values are better seen on a logarithmic axis."""
    return bool(values) and min(values) > SMALLEST and max(values) >= LOGARITHMIC_FROM * min(values)


class Tick(NamedTuple):
    value: float
    text: str


@dataclass(frozen=True)
class Scale:
    """From a value to a place between `start` and `end`; what lies outside of `low` and `high` is put at the edge. A
    logarithmic one puts what is not above `low` at its beginning."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[Tick, ...]
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        inside = min(self.high, max(self.low, value))
        if self.logarithmic:
            share = math.log(inside / self.low) / math.log(self.high / self.low)
        else:
            share = (inside - self.low) / (self.high - self.low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` (at least 3) multiples of 1, 2 or 5 times a power of ten, that reach around `low` and `high`."""
    if high - low <= max(max(abs(low), abs(high)) * 1e-3, SMALLEST):  # too close for ticks between them
        room = max(abs(high) * 0.05, SMALLEST) if high else 0.5
        low, high = (0.0, 1.0) if low == high == 0 else (low - room, high + room)
    step = _step_from((high - low) / max(1, most - 1))
    while True:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < max(3, most):  # around 0 there are always three
            return [number * step for number in range(first, last + 1)]
        step = _step_from(step * 1.01)


def _step_from(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= least * (1 - 1e-9))


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Ticks from at or below `low` (above 0) to at or above `high`: at 1, 2 and 5 where these are at most `most`, else
    at 1 and 10 or every few decades."""
    high = max(high, low * 1.001)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        every = [factor * 10.0**power for power in powers for factor in factors]
        below = max(each for each in every if each <= low * (1 + 1e-9))
        above = min(each for each in every if each >= high * (1 - 1e-9))
        found = [each for each in every if below <= each <= above]
        if len(found) <= max(2, most):
            return found
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    stride = math.ceil((last - first) / max(1, most - 1))
    return [10.0 ** (first + stride * number) for number in range(math.ceil((last - first) / stride) + 1)]


def axis(
    low: float,
    high: float,
    start: float,
    end: float,
    *,
    most: int = 7,
    logarithmic: bool = False,
    floor: float | None = None,
    size: Callable[[str], float] = text_width,
) -> Scale:
    """A scale whose ticks reach around the values and whose labels, `size` of each text along the axis, keep apart.
    `floor` is where a logarithmic axis ends below: its lowest label says that less is there too."""
    if logarithmic:
        low = max(low, floor or SMALLEST)
        high = max(high, low)

    def scale(count: int) -> Scale:
        values = log_ticks(low, high, count) if logarithmic else linear_ticks(low, high, count)
        step = min((after - before for before, after in pairwise(values)), default=0.0)
        texts = [superscript(each) for each in values] if logarithmic else prefixed(values, step)
        if floor and logarithmic and values[0] <= floor:
            texts[0] = f"≤{texts[0]}"
        ticks = tuple(Tick(value, text) for value, text in zip(values, texts, strict=True))
        return Scale(values[0], values[-1], start, end, ticks, logarithmic)

    found = (scale(count) for count in range(max(2, most), 1, -1))
    fitting = next((each for each in found if keep_apart(each, size)), None)
    if fitting:
        return fitting
    least = scale(2)
    return replace(least, ticks=(least.ticks[0], least.ticks[-1]))


def keep_apart(scale: Scale, size: Callable[[str], float]) -> bool:
    places = [(abs(scale(tick.value) - scale.start), size(tick.text)) for tick in scale.ticks]
    return all(
        after - before >= (wide + next_wide) / 2 + GAP
        for (before, wide), (after, next_wide) in pairwise(places)
    )


LINE = 1.35 * SIZE
"""The height of a line of text."""
BESIDE_NAME = 64.0
"""The width beside the name of an upright axis, for which way is better."""
TICKS_BELOW = 18.0
"""The height of the labels below a plot."""


def label_width(words: str) -> float:
    return text_width(words, SMALL)


def label_height(_: str) -> float:
    return SMALL


def gutter(scale: Scale) -> float:
    """The room that the labels of an upright axis need."""
    return max(label_width(tick.text) for tick in scale.ticks) + 8


def lying(make: Callable[[float, float], Scale], start: float, end: float, width: float) -> Scale:
    """A scale from `start` to `end`, or a shorter one where its first or last label would not lie within the width."""
    scale = make(start, end)
    for _ in range(4):
        first, last = (label_width(scale.ticks[place].text) / 2 for place in (0, -1))
        over = (
            max(0.0, first - scale(scale.ticks[0].value)),
            max(0.0, scale(scale.ticks[-1].value) + last - width),
        )
        if not any(over):
            break
        start, end = start + over[0], end - over[1]
        scale = make(start, end)
    return scale


def below(scale: Scale, top: float, bottom: float) -> Svg:
    """An axis that lies below a plot, with a line through the plot at each tick."""
    lines = (f"M{number(scale(each.value))},{number(top)}V{number(bottom)}" for each in scale.ticks)
    labels = [text(scale(each.value), bottom + 15, each.text) for each in scale.ticks]
    zero = line(scale(0), top, scale(0), bottom, "c-zero") if scale.holds(0) else ""
    return _axis(lines, zero, labels, "middle")


def beside(scale: Scale, left: float, right: float) -> Svg:
    """An axis that stands left of a plot."""
    lines = (f"M{number(left)},{number(scale(each.value))}H{number(right)}" for each in scale.ticks)
    labels = [text(left - 6, scale(each.value) + 4, each.text) for each in scale.ticks]
    zero = line(left, scale(0), right, scale(0), "c-zero") if scale.holds(0) else ""
    return _axis(lines, zero, labels, "end")


def _axis(lines: Iterable[str], zero: str, labels: Sequence[str], anchor: str) -> Svg:
    named = element("g", *labels, text_anchor=anchor)
    return group("c-axis", element("path", d="".join(lines)), zero, named, hidden=True)


def name_of(words: str, scale: Scale, x: float, y: float, width: float) -> Svg:
    """The name of an axis, from the left edge or, where `x` is another, up to there."""
    kind = f"{words}, log scale" if scale.logarithmic else words
    return group("c-name", text(x, y, kind, anchor="end" if x else None, width=width, size=SMALL))


CAP = 4.0


def whisker(ci: Interval | None, scale: Scale, at: float, *, upright: bool = False, cap: float = CAP) -> Svg:
    """Along the scale, at a place of the other axis; nothing where there is no interval."""
    if ci is None or not drawable(*ci):
        return Svg("")
    low, high = scale(ci[0]), scale(ci[1])
    whole = _stroke((low, at), (high, at), upright)
    ends = _end(low, scale.start, scale.end, at, upright, cap, beyond=ci[0] < scale.low * (1 - 1e-9))
    ends += _end(high, scale.end, scale.start, at, upright, cap, beyond=ci[1] > scale.high * (1 + 1e-9))
    return element("path", d=whole + ends, class_="c-ci")


def _end(
    place: float, edge: float, other_edge: float, at: float, upright: bool, cap: float, *, beyond: bool
) -> str:
    """A cap, or an arrow that points beyond the edge."""
    if not beyond:
        return _stroke((place, at - cap), (place, at + cap), upright)
    back = edge + (cap if other_edge > edge else -cap)
    return _stroke((back, at - cap), (edge, at), upright) + _stroke((edge, at), (back, at + cap), upright)


def _stroke(start: tuple[float, float], end: tuple[float, float], upright: bool) -> str:
    (x1, y1), (x2, y2) = (start[::-1], end[::-1]) if upright else (start, end)
    from_x, from_y, to_x, to_y = number(x1), number(y1), number(x2), number(y2)
    if from_y == to_y:
        return f"M{from_x},{from_y}H{to_x}"
    return f"M{from_x},{from_y}" + (f"V{to_y}" if from_x == to_x else f"L{to_x},{to_y}")


HEIGHT_WIDE, HEIGHT_NARROW = 330.0, 280.0
"""Of a plot."""
ROOM = 0.06
"""The part of an axis that stays free beyond its values."""


@dataclass(frozen=True)
class Extent:
    """What an axis has to show. From 0 on a linear axis, unless `loose`; `floor` is where a logarithmic one ends."""

    values: tuple[float, ...]
    bounds: tuple[float, ...] = ()
    logarithmic: bool = False
    floor: float | None = None
    loose: bool = False

    @classmethod
    def of(cls, values: Sequence[float], bounds: Sequence[float], *, floor: float | None = None) -> "Extent":
        """Logarithmic where the values span decades."""
        above = [each for each in values if floor is None or each > floor]
        positive = all(each >= 0 for each in values)
        return cls(tuple(values), tuple(bounds), positive and spans_decades(above), floor)

    def scale(self, start: float, end: float, *, most: int, upright: bool) -> Scale:
        low, high = self.range()
        size = label_height if upright else label_width
        return axis(
            low, high, start, end, most=most, logarithmic=self.logarithmic, floor=self.floor, size=size
        )

    def range(self) -> tuple[float, float]:
        """Around all values, and around intervals as far as these are not many times larger."""
        if self.logarithmic:
            shown = [each for each in self.values if each > (self.floor or 0)] or [self.floor or 1.0]
            near = [
                each for each in self.bounds if drawable(each) and min(shown) / 3 <= each <= max(shown) * 3
            ]
            low = min(shown + near) / 1.15
            hidden = self.floor is not None and len(shown) < len(self.values)
            return (self.floor or low) if hidden else low, max(shown + near) * 1.15
        low, high = min(self.values), max(self.values)
        room = max(high - min(low, 0.0), high - low) or abs(high) or 1.0
        near = [each for each in self.bounds if drawable(each) and low - room <= each <= high + room]
        low, high = min([low, *near]), max([high, *near])
        if self.loose:
            return low - ROOM * (high - low), high + ROOM * (high - low)
        return min(0.0, low * (1 + ROOM)), max(0.0, high * (1 + ROOM))


@dataclass(frozen=True)
class Plane:
    """Two scales, with their edges; `bottom` is that of the plot and `height` that of all."""

    x: Scale
    y: Scale
    x_name: str
    y_name: str
    frame: Frame

    @classmethod
    def fitted(cls, frame: Frame, x: Extent, y: Extent, names: tuple[str, str], *, top: float) -> "Plane":
        """`names` are of x and y; `top` is where the plot begins, below the name of the upright axis."""
        height = HEIGHT_NARROW if frame.is_narrow else HEIGHT_WIDE
        upright = y.scale(top + height, top, most=7, upright=True)
        left = gutter(upright)
        most = 5 if frame.is_narrow else 8
        across = lying(
            lambda start, end: x.scale(start, end, most=most, upright=False),
            left,
            frame.width - 14,
            frame.width,
        )
        return cls(across, upright, *names, frame)

    @property
    def top(self) -> float:
        return self.y.end

    @property
    def bottom(self) -> float:
        return self.y.start

    @property
    def height(self) -> float:
        return self.bottom + TICKS_BELOW + LINE

    @property
    def box(self) -> Box:
        return Box(self.x.start, self.top, self.x.end, self.bottom)

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x(x), self.y(y)

    def axes(self, *, y_name_at: float = 11.0) -> tuple[Svg, ...]:
        width = self.frame.width
        return (
            beside(self.y, self.x.start, self.x.end),
            below(self.x, self.top, self.bottom),
            name_of(self.y_name, self.y, 0, y_name_at, width - BESIDE_NAME),
            name_of(self.x_name, self.x, width, self.bottom + TICKS_BELOW + 13, width),
        )


SERIES = 6
"""Colours of charts.css. There is one shape fewer, so that a pair repeats after 30 series."""
RADIUS = 5.0


def point(x: float, y: float, series: int, *, valid: bool = True, faint: bool = False) -> Svg:
    """Hollow if it is not valid, small if it is faint."""
    radius = RADIUS * (0.8 if faint else 1.0)
    names = [f"c-point c-s{series % SERIES + 1}", "" if valid else "c-invalid", "c-off" if faint else ""]
    class_ = " ".join(filter(None, names))
    shape = _SHAPES[series % len(_SHAPES)]
    if shape is None:
        return element("circle", cx=x, cy=y, r=radius, class_=class_)
    corners = " ".join(f"{number(x + radius * across)},{number(y + radius * down)}" for across, down in shape)
    return element("polygon", points=corners, class_=class_)


_SHAPES: tuple[tuple[tuple[float, float], ...] | None, ...] = (
    None,
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.15), (1.1, 0.85), (-1.1, 0.85)),
    ((0, -1.25), (1.25, 0), (0, 1.25), (-1.25, 0)),
    ((0, 1.15), (1.1, -0.85), (-1.1, -0.85)),
)
"""Corners in radii; None is a circle."""


MARK, APART = 17.0, 16.0


Sample = Callable[[float, float, int], Svg]
"""What stands for a series in a key, from its middle and its number."""


def key(names: Sequence[str], width: float, *, sample: Sample = point, least: int = 2) -> tuple[Svg, float]:
    """Each name after its sample, and how high all are; nothing for fewer than `least` names."""
    if len(names) < least:
        return Svg(""), 0.0
    parts: list[str] = []
    x, row = 0.0, 0
    for place, name in enumerate(names):
        shown = shortened(name, width - MARK, SMALL, tail=TAIL)
        wide = MARK + text_width(shown, SMALL)
        if x and x + wide > width:
            x, row = 0.0, row + 1
        middle = LINE * row + LINE / 2
        parts += [sample(x + 7, middle, place), text(x + MARK, middle + 4, shown)]
        x += wide + APART
    return group("c-key", *parts), LINE * (row + 1) + 4
