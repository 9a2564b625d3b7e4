"""A ladder: a bar from the speedup of each rung to that of the next, what a technique buys alone, and what the whole
loses without it."""

from dataclasses import dataclass

from optigpu.documents.result import Gain
from optigpu.report.charts.ladders import Step, Steps
from optigpu.report.charts.svg.axes import (
    LINE,
    TICKS_BELOW,
    Scale,
    axis,
    below,
    drawable,
    label_width,
    lying,
    name_below,
    spans_decades,
    whisker,
)
from optigpu.report.charts.svg.bars import BAR, figure_text
from optigpu.report.charts.svg.markup import (
    SMALL,
    TAIL,
    Drawing,
    Frame,
    Link,
    Sketch,
    Svg,
    element,
    group,
    line,
    linked,
    number,
    rect,
    text,
    text_width,
    title,
    wrapped,
)
from optigpu.report.numbers import ratio

MOST_STEPS = 24
DOT = 15.0
"""The height of the row of a point below a bar."""
GUTTER = 0.3
LOGARITHMIC_FROM = 6.0
"""Ratios are added up on a logarithmic axis where the largest is so many times the smallest."""
HEADROOM = 2.0
AXIS = "times the baseline"


def waterfall(steps: Steps, link: Link | None = None) -> Sketch | str:
    """A row for the baseline and for each rung. `link` makes the names links to their results."""
    drawn = tuple(each for each in steps.steps if drawable(each.before, each.speedup.ratio))
    if not drawn:
        reasons = " ".join(dict.fromkeys(steps.missing.values()))
        return f"{steps.title}: no rung of a ladder has a speedup. {reasons}"
    last = drawn[-1]
    return Sketch(
        steps.title,
        f"Speedup of a ladder of {len(drawn)} rungs, up to {ratio(last.speedup)} the baseline. "
        "Lines are 95% intervals. The table has all figures.",
        lambda frame: _Waterfall(frame, drawn[:MOST_STEPS], link).drawing(len(drawn) - MOST_STEPS),
    )


@dataclass(frozen=True)
class _Waterfall:
    frame: Frame
    steps: tuple[Step, ...]
    link: Link | None

    def drawing(self, left_out: int) -> Drawing:
        legend, y = self._legend()
        scale = self._scale()
        first = y
        parts: list[str] = []
        made, y = self._baseline(scale, y)
        parts.append(made)
        for each in self.steps:
            made, y = self._step(each, scale, y)
            parts.append(made)
        axes = [below(scale, first - 4, y), self._one(scale, first - 4, y)]
        axes.append(name_below(AXIS, scale, self.frame.width, y + 30, self.frame.width))
        y += TICKS_BELOW + LINE
        if left_out > 0:
            y += LINE
            axes.append(text(0, y - 6, f"{left_out} more are in the table.", class_="c-faint"))
        return Drawing(y, (legend, *axes, *parts))

    def _gains(self) -> list[Gain]:
        return [
            gain
            for each in self.steps
            for gain in (each.speedup, each.alone, each.left_out)
            if gain and drawable(gain.ratio)
        ]

    def _scale(self) -> Scale:
        left = 6.0 if self.frame.is_narrow else self._names + 12
        right = self.frame.width - (12 if self.frame.is_narrow else self._figures + 14)
        ratios = [1.0, *(gain.ratio for gain in self._gains())]
        low, high = min(ratios), max(ratios)
        logarithmic = low > 0 and (high >= LOGARITHMIC_FROM * low or spans_decades(ratios))
        bounds = [bound for gain in self._gains() if gain.ci and drawable(*gain.ci) for bound in gain.ci]
        near = [bound for bound in bounds if low / HEADROOM <= bound <= high * HEADROOM]
        low, high = min([low, *near]), max([high, *near])
        low = low if logarithmic else min(0.0, low)
        most = 4 if self.frame.is_narrow else 7
        return lying(
            lambda start, end: axis(
                low, high, start, end, most=most, logarithmic=logarithmic, size=label_width
            ),
            left,
            right,
            self.frame.width,
        )

    @property
    def _names(self) -> float:
        return min(max(text_width(each.label) for each in self.steps) + 2, GUTTER * self.frame.width)

    @property
    def _figures(self) -> float:
        return max(text_width(ratio(each.speedup)) for each in self.steps) + 4

    def _legend(self) -> tuple[Svg, float]:
        """What the marks are, of those that occur."""
        entries: list[tuple[str, str]] = [("bar", "added to the rungs before")]
        if any(each.alone for each in self.steps):
            entries.append(("alone", "alone, against the baseline"))
        if any(each.left_out for each in self.steps):
            entries.append(("left_out", "the whole against the whole without it"))
        if len(entries) == 1:
            return Svg(""), 4.0
        parts: list[str] = []
        x, y = 0.0, 8.0
        for kind, words in entries:
            wide = 16 + text_width(words, SMALL) + 14
            if x and x + wide - 14 > self.frame.width:
                x, y = 0.0, y + LINE
            sample = rect(x, y - 5, 10, 10, "c-bar c-gain") if kind == "bar" else _mark(kind, x + 5, y)
            parts += [sample, text(x + 16, y + 4, words)]
            x += wide
        return group("c-key", *parts), y + LINE

    def _one(self, scale: Scale, top: float, bottom: float) -> Svg:
        """The baseline's line."""
        return line(scale(1.0), top, scale(1.0), bottom, "c-one")

    def _baseline(self, scale: Scale, y: float) -> tuple[Svg, float]:
        x = scale(1.0)
        mark = rect(x - 1.5, y + 3, 3, BAR, "c-bar c-plain")
        if self.frame.is_narrow:
            name = text(0, y + 12, "baseline", class_="c-label")
            return group(
                "c-row", name, text(self.frame.width, y + 12, "1", anchor="end", class_="c-value")
            ), y + 24
        middle = y + 3 + BAR / 2 + 4
        figure = text(self.frame.width, middle, "1", anchor="end", class_="c-value")
        return group("c-row", text(0, middle, "baseline", class_="c-label"), mark, figure), y + BAR + 12

    def _step(self, each: Step, scale: Scale, y: float) -> tuple[Svg, float]:
        """A bar with its interval; below it what the technique buys alone, and what the whole loses without it."""
        figure = ratio(each.speedup)
        room = self.frame.width - text_width(figure) - 12
        lines = wrapped(each.label, room if self.frame.is_narrow else self._names, 2, tail=TAIL)
        more = LINE * (len(lines) - 1)
        top, at = (y + 19 + more, y + 12) if self.frame.is_narrow else (y + 4, y + 8 + BAR / 2)
        names = [text(0, at + LINE * n, words, class_="c-label") for n, words in enumerate(lines)]
        label = linked(self.link, each.source, None, title(_said(each)), *names)
        effects = [("alone", each.alone), ("left_out", each.left_out)]
        known = [(kind, gain) for kind, gain in effects if gain and drawable(gain.ratio)]
        points = [
            _effect(kind, gain, scale, top + BAR + 4 + DOT * (place + 0.5))
            for place, (kind, gain) in enumerate(known)
        ]
        end = top + BAR + 4 + DOT * len(known)
        if not self.frame.is_narrow:
            end = max(end, at + more + 2)
        figures = figure_text(figure, self.frame.width, at)
        return group("c-row", label, _bar(each, scale, top), *points, figures), end + 8


def _bar(each: Step, scale: Scale, top: float) -> Svg:
    begin, end = sorted((scale(each.before), scale(each.speedup.ratio)))
    kind = "c-gain" if each.speedup.ratio >= each.before else "c-loss"
    valid = "" if each.speedup.valid else " c-invalid"
    return group(
        f"c-bar {kind}{valid}",
        rect(begin, top, max(1.5, end - begin), BAR),
        whisker(each.speedup.ci, scale, top + BAR / 2),
    )


def _effect(kind: str, gain: Gain, scale: Scale, y: float) -> Svg:
    x = scale(gain.ratio)
    valid = "" if gain.valid else " c-invalid"
    return group(
        f"c-effect{valid}", line(scale(1.0), y, x, y), whisker(gain.ci, scale, y, cap=3), _mark(kind, x, y)
    )


def _mark(kind: str, x: float, y: float) -> Svg:
    if kind == "alone":
        return element("circle", cx=x, cy=y, r=4.0, class_="c-point c-s2")
    corners = " ".join(f"{number(x + a)},{number(y + b)}" for a, b in ((0, -5), (5, 0), (0, 5), (-5, 0)))
    return element("polygon", points=corners, class_="c-point c-s3")


def _said(each: Step) -> str:
    parts = [
        f"{words} {ratio(gain)}"
        for words, gain in (("added", each.added), ("alone", each.alone), ("left out", each.left_out))
        if gain
    ]
    return f"{each.label}: {', '.join([ratio(each.speedup), *parts])}"
