"""Axes as arithmetic: ticks at 1, 2 and 5 or at decades, and where a value lies on the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from optigpu.report.charts.svg.words import text_width
from optigpu.report.numbers import prefixed, superscript

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


@dataclass(frozen=True)
class Tick:
    value: float
    text: str


@dataclass(frozen=True)
class Scale:
    """From a value to a place between `start` and `end`; what lies outside of `low` and `high` is put at the edge.

    A logarithmic one puts what is not above `low` at its beginning.
    """

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
    """At most `most` (at least 3) multiples of 1, 2 or 5 times a power of ten, from at or below `low` to at or above
    `high`."""
    low, high = _apart(low, high)
    step = _step_from((high - low) / max(1, most - 1))
    while True:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < max(3, most):  # around 0 there are always three
            return [number * step for number in range(first, last + 1)]
        step = _step_from(step * 1.01)


def _apart(low: float, high: float) -> tuple[float, float]:
    """Bounds that differ enough for ticks between them."""
    least = max(abs(low), abs(high)) * 1e-3
    if high - low > max(least, SMALLEST):
        return low, high
    room = max(abs(high) * 0.05, SMALLEST) if high else 0.5
    return (0.0, 1.0) if low == high == 0 else (low - room, high + room)


def _step_from(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is at least so large."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(each * power for each in (1, 2, 5, 10) if each * power >= least * (1 - 1e-9))


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Ticks from at or below `low` (above 0) to at or above `high`: at 1, 2 and 5 where these are at most `most`, else
    at 1 and 10 or every few decades."""
    high = max(high, low * 1.001)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = _multiples(low, high, factors)
        if len(found) <= max(2, most):
            return found
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    stride = math.ceil((last - first) / max(1, most - 1))
    return [10.0 ** (first + stride * number) for number in range(math.ceil((last - first) / stride) + 1)]


def _multiples(low: float, high: float, factors: Sequence[int]) -> list[float]:
    """The factors times powers of ten, from the last at or below `low` to the first at or above `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    every = [factor * 10.0**power for power in powers for factor in factors]
    below = max(each for each in every if each <= low * (1 + 1e-9))
    above = min(each for each in every if each >= high * (1 - 1e-9))
    return [each for each in every if below <= each <= above]


def tick_texts(ticks: Sequence[float], *, logarithmic: bool = False) -> list[str]:
    """Labels with the decimals that the ticks need and a common prefix, or powers of ten."""
    if logarithmic:
        return [superscript(each) for each in ticks]
    step = min((after - before for before, after in pairwise(ticks)), default=0.0)
    return prefixed(ticks, step)


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

    `floor` is where a logarithmic axis ends below: its lowest label says that less is there too.
    """
    if logarithmic:
        low = max(low, floor or SMALLEST)
        high = max(high, low)

    def scale(count: int) -> Scale:
        values = log_ticks(low, high, count) if logarithmic else linear_ticks(low, high, count)
        texts = tick_texts(values, logarithmic=logarithmic)
        if floor and logarithmic and values[0] <= floor:
            texts[0] = f"≤{texts[0]}"
        ticks = tuple(Tick(value, text) for value, text in zip(values, texts, strict=True))
        return Scale(values[0], values[-1], start, end, ticks, logarithmic)

    found = (scale(count) for count in range(max(2, most), 1, -1))
    fitting = next((each for each in found if _keep_apart(each, size)), None)
    if fitting:
        return fitting
    least = scale(2)
    return replace(least, ticks=(least.ticks[0], least.ticks[-1]))


def _keep_apart(scale: Scale, size: Callable[[str], float]) -> bool:
    places = [(abs(scale(tick.value) - scale.start), size(tick.text)) for tick in scale.ticks]
    return all(
        after - before >= (wide + next_wide) / 2 + GAP
        for (before, wide), (after, next_wide) in pairwise(places)
    )
