"""A plot with two axes: where its edges are, and its lines, labels and names."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.report.charts.svg.axes import (
    LINE,
    TICKS_BELOW,
    below,
    beside,
    gutter,
    label_height,
    label_width,
    lying,
    name_above,
    name_below,
)
from optigpu.report.charts.svg.markup import Frame, Svg
from optigpu.report.charts.svg.places import Box
from optigpu.report.charts.svg.scales import Scale, axis, drawable, spans_decades

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
        return (
            beside(self.y, self.x.start, self.x.end),
            below(self.x, self.top, self.bottom),
            name_above(self.y_name, self.y, y_name_at, self.frame.width),
            name_below(
                self.x_name, self.x, self.frame.width, self.bottom + TICKS_BELOW + 13, self.frame.width
            ),
        )
