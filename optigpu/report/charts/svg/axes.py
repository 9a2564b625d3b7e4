"""The lines and labels of axes."""

from collections.abc import Callable, Sequence

from optigpu.report.charts.svg.markup import Svg, element, group, line, number, text
from optigpu.report.charts.svg.scales import Scale
from optigpu.report.charts.svg.words import SIZE, SMALL, text_width

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
    lines = "".join(f"M{number(scale(tick.value))},{number(top)}V{number(bottom)}" for tick in scale.ticks)
    labels = [text(scale(tick.value), bottom + 15, tick.text) for tick in scale.ticks]
    zero = line(scale(0), top, scale(0), bottom, "c-zero") if scale.holds(0) else ""
    return _axis(lines, zero, labels, "middle")


def beside(scale: Scale, left: float, right: float) -> Svg:
    """An axis that stands left of a plot."""
    lines = "".join(f"M{number(left)},{number(scale(tick.value))}H{number(right)}" for tick in scale.ticks)
    labels = [text(left - 6, scale(tick.value) + 4, tick.text) for tick in scale.ticks]
    zero = line(left, scale(0), right, scale(0), "c-zero") if scale.holds(0) else ""
    return _axis(lines, zero, labels, "end")


def _axis(lines: str, zero: str, labels: Sequence[str], anchor: str) -> Svg:
    named = element("g", *labels, text_anchor=anchor)
    return group("c-axis", element("path", d=lines), zero, named, hidden=True)


def name_above(words: str, scale: Scale, y: float, width: float) -> Svg:
    """The name of an upright axis, above the plot from the left edge; what is said at the right has its own room."""
    return _name(_with_kind(words, scale), 0, y, width - BESIDE_NAME, None)


def name_below(words: str, scale: Scale, x: float, y: float, width: float) -> Svg:
    """The name of an axis below a plot, at its right end."""
    return _name(_with_kind(words, scale), x, y, width, "end")


def _with_kind(words: str, scale: Scale) -> str:
    return f"{words}, log scale" if scale.logarithmic else words


def _name(words: str, x: float, y: float, width: float, anchor: str | None) -> Svg:
    return group("c-name", text(x, y, words, anchor=anchor, width=width, size=SMALL))
