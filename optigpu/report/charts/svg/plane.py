"""A plot with two axes: where its edges are, and its lines, labels and names."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from optigpu.report.charts.svg.axes import (
    BESIDE_NAME,
    LINE,
    TICKS_BELOW,
    Scale,
    axis,
    below,
    beside,
    drawable,
    gutter,
    label_height,
    label_width,
    lying,
    name_of,
    spans_decades,
)
from optigpu.report.charts.svg.markup import (
    SMALL,
    TAIL,
    Frame,
    Svg,
    element,
    group,
    number,
    shortened,
    text,
    text_width,
)

NEAR, FAR = 8.0, 16.0
"""How far labels stand from their points."""


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def met(self, others: Sequence["Box"]) -> list["Box"]:
        """Those of the others that lie on it."""
        left, top, right, bottom = self
        return [
            each
            for each in others
            if left < each.right and each.left < right and top < each.bottom and each.top < bottom
        ]

    def meets_any(self, others: Sequence["Box"]) -> bool:
        """Whether one of the others lies on it."""
        return bool(self.met(others))

    def holds(self, other: "Box") -> bool:
        return (
            self.left <= other.left
            and self.top <= other.top
            and other.right <= self.right
            and other.bottom <= self.bottom
        )

    def common(self, other: "Box") -> float:
        """The area that both cover."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, across) * max(0.0, down)


class Wanted(NamedTuple):
    """A label of a point: where the point is, and the size of the label."""

    x: float
    y: float
    width: float
    height: float


def around(x: float, y: float, radius: float) -> Box:
    return Box(x - radius, y - radius, x + radius, y + radius)


def placed(
    wanted: Sequence[Wanted], page: Box, solid: Sequence[Box], soft: Sequence[Box]
) -> list[Box | None]:
    """A place for each label, in their order; None where there is none left. Labels lie on no `solid` box, and on
    `soft` ones as little as they can."""
    taken, found = list(solid), []
    for each in wanted:
        place = _place(each, page, taken, soft)
        found.append(place)
        taken += [place] if place else []
    return found


def _place(each: Wanted, page: Box, taken: Sequence[Box], soft: Sequence[Box]) -> Box | None:
    """The best place of a label: one that is further off has to cover less for it."""
    wide, high = FAR + each.width, FAR + each.height
    reach = Box(each.x - wide, each.y - high, each.x + wide, each.y + high)
    taken, soft = reach.met(taken), reach.met(soft)
    best, least = None, math.inf
    for rank, place in enumerate(_candidates(each)):
        if 2.0 * rank >= least:
            break
        if page.holds(place) and not place.meets_any(taken):
            cost = sum(map(place.common, place.met(soft))) + 2.0 * rank
            if cost < least:
                best, least = place, cost
    return best


def _candidates(each: Wanted) -> Iterator[Box]:
    """Right, left, above, below and between, close to the point and then further off."""
    x, y, wide, high = each
    for gap in (NEAR, FAR):
        near = gap * 0.6
        corners = (
            (x + gap, y - high / 2),
            (x - gap - wide, y - high / 2),
            (x + near, y - near - high),
            (x - near - wide, y - near - high),
            (x + near, y + near),
            (x - near - wide, y + near),
            (x - wide / 2, y - gap - high),
            (x - wide / 2, y + gap),
        )
        yield from (Box(left, top, left + wide, top + high) for left, top in corners)


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
    def fitted(
        cls, frame: Frame, x: Extent, y: Extent, names: tuple[str, str], *, top: float = LINE + 8,
        plot: float | None = None, right: float = 14.0
    ) -> "Plane":  # fmt: skip
        """`names` are of x and y; `top` is where the plot begins, below the name of the upright axis."""
        height = plot or (HEIGHT_NARROW if frame.is_narrow else HEIGHT_WIDE)
        upright = y.scale(top + height, top, most=7, upright=True)
        left = gutter(upright)
        most = 5 if frame.is_narrow else 8
        across = lying(
            lambda start, end: x.scale(start, end, most=most, upright=False),
            left,
            frame.width - right,
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


MARK, GAP = 17.0, 16.0


Sample = Callable[[float, float, int], Svg]
"""What stands for a series in a key, from its middle and its number."""


def key(
    names: Sequence[str], width: float, y: float, *, sample: Sample = point, least: int = 2
) -> tuple[Svg, float]:
    """Each name after its sample, from `y` down, and how high that is; nothing for fewer than `least` names."""
    if len(names) < least:
        return Svg(""), 0.0
    parts: list[str] = []
    x, row = 0.0, 0
    for place, name in enumerate(names):
        shown = shortened(name, width - MARK, SMALL, tail=TAIL)
        wide = MARK + text_width(shown, SMALL)
        if x and x + wide > width:
            x, row = 0.0, row + 1
        middle = y + LINE * row + LINE / 2
        parts += [sample(x + 7, middle, place), text(x + MARK, middle + 4, shown)]
        x += wide + GAP
    return group("c-key", *parts), LINE * (row + 1) + 4
