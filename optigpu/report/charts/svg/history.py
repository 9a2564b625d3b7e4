"""Values over time with a band of their 95% intervals, and a numbered mark where the level changes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.report.charts.history import Change, Moment, Timeline
from optigpu.report.charts.svg.axes import LINE, gutter
from optigpu.report.charts.svg.dates import day, time_axis, time_name
from optigpu.report.charts.svg.markup import (
    Drawing,
    Frame,
    Link,
    Svg,
    chart,
    element,
    group,
    line,
    linked,
    path,
    sentence,
    text,
    title,
)
from optigpu.report.charts.svg.plane import Extent, Plane
from optigpu.report.charts.svg.scales import Scale, drawable
from optigpu.report.charts.svg.whiskers import whisker
from optigpu.report.charts.svg.words import SMALL, wrapped
from optigpu.report.numbers import short
from optigpu.vocabulary import Better

MOST_MOMENTS = 200
"""The newest of them are drawn; the table has all."""
MOST_DOTS = 40
MOST_CHANGES = 8
FLAG = 8.0
"""The radius of a change's number."""
LANES = 3
"""Rows of numbers above the plot."""


def svg(timeline: Timeline, *, id_prefix: str, link: Link | None = None) -> Svg:
    """A point for each result, the oldest first. `link` makes points links to their results."""
    moments = tuple(each for each in timeline.moments if drawable(each.value))[-MOST_MOMENTS:]
    if not moments:
        return sentence(f"{timeline.title}: there is no valid result to draw yet.")
    changes = tuple(each for each in timeline.changes if each.at >= moments[0].at)[-MOST_CHANGES:]
    return chart(
        lambda frame: _History(frame, timeline, moments, changes, link).drawing(),
        heading=timeline.title,
        description=_spoken(timeline, moments, changes),
        id_prefix=id_prefix,
    )


def _spoken(timeline: Timeline, moments: Sequence[Moment], changes: Sequence[Change]) -> str:
    first, last = moments[0], moments[-1]
    span = f"{timeline.axis} of {len(moments)} results: {short(first.value)} on {day(first.at)}"
    said = [f"{day(each.at)}: {each.text}" for each in changes]
    return ". ".join([f"{span}, {short(last.value)} on {day(last.at)} (UTC)", *said])


@dataclass(frozen=True)
class _History:
    frame: Frame
    timeline: Timeline
    moments: tuple[Moment, ...]
    changes: tuple[Change, ...]
    link: Link | None

    def drawing(self) -> Drawing:
        plane = self._plane()
        points = [plane.at(each.at.timestamp(), each.value) for each in self.moments]
        listed, height = self._listed(plane.height + 6)
        better = "↑ better" if self.timeline.better is Better.HIGHER else "↓ better"
        parts = (
            *plane.axes(),
            text(self.frame.width, 11, better, class_="c-faint", anchor="end"),
            *self._bands(plane),
            path(points, "c-line c-s1"),
            *(self._flag(number, plane) for number in range(len(self.changes))),
            *self._dots(points),
            listed,
        )
        return Drawing(height, parts)

    def _plane(self) -> Plane:
        y = Extent(
            tuple(each.value for each in self.moments),
            tuple(bound for each in self.moments for bound in each.ci or ()),
            loose=True,
        )
        top = LINE + 8
        plot = 200.0 if self.frame.is_narrow else 240.0

        def upright(above: float) -> Scale:
            return y.scale(top + above + plot, top + above, most=6, upright=True)

        times = [each.at for each in self.moments]
        most = 5 if self.frame.is_narrow else 9
        across = time_axis(times, gutter(upright(0)), self.frame.width - 14, most=most)
        flags = 2 * FLAG * (1 + max(lane or 0 for lane in self._lanes(across))) + 2 if self.changes else 0.0
        return Plane(across, upright(flags), time_name(times), self.timeline.axis, self.frame)

    def _bands(self, plane: Plane) -> list[Svg]:
        """A band over each run of results that have intervals; a whisker for one that stands alone."""
        found: list[Svg] = []
        run: list[Moment] = []
        for each in [*self.moments, None]:
            if each is not None and each.ci and drawable(*each.ci):
                run.append(each)
                continue
            if run:
                found.append(_band(run, plane))
            run = []
        return found

    def _dots(self, points: Sequence[tuple[float, float]]) -> list[Svg]:
        """A point for each result; of many the line alone."""
        if len(points) > MOST_DOTS:
            return []
        return [self._dot(each, *place) for each, place in zip(self.moments, points, strict=True)]

    def _dot(self, each: Moment, x: float, y: float) -> Svg:
        said = f"{day(each.at)}: {short(each.value)} {self.timeline.axis}"
        dot = element("circle", title(said), cx=x, cy=y, r=3.5, class_="c-point c-s1")
        return linked(self.link, each.source, said, dot)

    def _flag(self, number: int, plane: Plane) -> Svg:
        """A line at the change, and its number above it where that lies on no other."""
        each = self.changes[number]
        x, lane = plane.x(each.at.timestamp()), self._lanes(plane.x)[number]
        y = plane.top - FLAG - 2 - 2 * FLAG * (lane or 0)
        parts = [title(f"{number + 1}. {day(each.at)}: {each.text}"), line(x, y + FLAG, x, plane.bottom)]
        if lane is not None:
            parts.append(element("circle", cx=x, cy=y, r=FLAG - 0.5))
            parts.append(text(x, y + 4, str(number + 1), anchor="middle"))
        return group(f"c-change {'c-gain' if each.improved else 'c-loss'}", *parts)

    def _lanes(self, x: Scale) -> list[int | None]:
        """The first row above the plot in which each number lies on no other; None where there is no such row."""
        ends = [-math.inf] * LANES
        lanes: list[int | None] = []
        for each in self.changes:
            at = x(each.at.timestamp())
            lane = next((lane for lane, end in enumerate(ends) if at - end >= 2 * FLAG), None)
            lanes.append(lane)
            if lane is not None:
                ends[lane] = at
        return lanes

    def _listed(self, y: float) -> tuple[Svg, float]:
        """The changes in words below the plot."""
        parts: list[str] = []
        for number, each in enumerate(self.changes):
            arrow = "▲" if each.improved else "▼"
            whole = f"{day(each.at)[:10]}: {each.text}"
            lines = wrapped(whole, self.frame.width - 34, 2, SMALL)
            name = "c-gain" if each.improved else "c-loss"
            parts.append(text(0, y + 11, f"{number + 1} {arrow}", class_=name))
            for words in lines:
                parts.append(text(30, y + 11, words))
                y += LINE
        return group("c-changes", *parts), y


def _band(run: Sequence[Moment], plane: Plane) -> Svg:
    if len(run) == 1:
        return whisker(run[0].ci, plane.y, plane.x(run[0].at.timestamp()), upright=True)
    bounds = [(plane.x(each.at.timestamp()), each.ci or (0.0, 0.0)) for each in run]
    above = [(x, plane.y(high)) for x, (_, high) in bounds]
    under = [(x, plane.y(low)) for x, (low, _) in reversed(bounds)]
    return path([*above, *under], "c-band c-s1", closed=True)
