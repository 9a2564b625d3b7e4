"""Values over time with a band of their 95% intervals and a numbered mark where the level changes, and how the samples
of each replicate are spread."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise

from optigpu.report.charts.history import Change, Counted, Moment, Samples, Timeline
from optigpu.report.charts.svg.axes import (
    GAP,
    LINE,
    TICKS_BELOW,
    Scale,
    Tick,
    axis,
    below,
    drawable,
    gutter,
    label_width,
    lying,
    name_below,
    whisker,
)
from optigpu.report.charts.svg.markup import (
    SMALL,
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
    path,
    shortened,
    text,
    text_width,
    title,
    wrapped,
)
from optigpu.report.charts.svg.plane import Extent, Plane
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


def history(timeline: Timeline, link: Link | None = None) -> Sketch | str:
    """A point for each result, the oldest first. `link` makes points links to their results."""
    moments = tuple(each for each in timeline.moments if drawable(each.value))[-MOST_MOMENTS:]
    if not moments:
        return f"{timeline.title}: there is no valid result to draw yet."
    changes = tuple(each for each in timeline.changes if each.at >= moments[0].at)[-MOST_CHANGES:]
    return Sketch(
        timeline.title,
        _spoken(timeline, moments, changes),
        lambda frame: _History(frame, timeline, moments, changes, link).drawing(),
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
        for place, each in enumerate(self.changes, 1):
            arrow = "▲" if each.improved else "▼"
            whole = f"{day(each.at)[:10]}: {each.text}"
            lines = wrapped(whole, self.frame.width - 34, 2, SMALL)
            name = "c-gain" if each.improved else "c-loss"
            parts.append(text(0, y + 11, f"{place} {arrow}", class_=name))
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


MINUTE, HOUR, DAY = 60, 3600, 86400
_STEPS = (1, 2, 5, 10, 30, MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 30 * MINUTE, HOUR, 2 * HOUR, 6 * HOUR,
          12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY)  # fmt: skip
"""Seconds between ticks; more are months."""
EDGE = 13.0
"""How far a label may reach beyond the axis."""
_MONTHS = (1, 2, 3, 6, 12, 24, 60, 120, 240, 600, 1200, 2400, 4800)


def time_axis(moments: Sequence[datetime], start: float, end: float, *, most: int) -> Scale:
    """From a little before the first moment to a little after the last; ticks lie inside. At least one is labelled."""
    seconds = [moment.timestamp() for moment in moments]
    low, high = min(seconds), max(seconds)
    room = (high - low) * 0.02 or 1800.0
    low, high = low - room, high + room
    for ticks in _choices(low, high):
        scale = Scale(low, high, start, end, ticks)
        if ticks and len(ticks) <= most and _labels_keep_apart(scale):
            return scale
    middle = (low + high) / 2
    return Scale(low, high, start, end, (Tick(middle, f"{_utc(middle):%Y-%m-%d}"),))


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _choices(low: float, high: float) -> Iterator[tuple[Tick, ...]]:
    """Ticks from the closest to the widest."""
    for step in _STEPS:
        if (high - low) / step < 50:
            first = int(low // step + 1) * step
            yield tuple(Tick(at, _text(at, step)) for at in range(first, int(high) + 1, step))
    for months in _MONTHS:
        if (high - low) / (months * 28 * DAY) < 50:
            yield tuple(_month_ticks(low, high, months))


def _text(at: float, step: int) -> str:
    moment = _utc(at)
    if step >= DAY or (moment.hour, moment.minute, moment.second) == (0, 0, 0):
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M:%S}" if step < MINUTE else f"{moment:%H:%M}"


def _month_ticks(low: float, high: float, months: int) -> Iterator[Tick]:
    begin, end = _utc(low), _utc(high)
    for count in range(begin.year * 12 // months * months, end.year * 12 + 12, months):
        year, month = divmod(count, 12)
        if 1 <= year <= 9999:
            at = datetime(year, month + 1, 1, tzinfo=UTC)
            if begin <= at <= end:
                yield Tick(at.timestamp(), f"{at:%Y}" if month == 0 else f"{at:%b}")


def _labels_keep_apart(scale: Scale) -> bool:
    places = [(scale(tick.value), text_width(tick.text, SMALL)) for tick in scale.ticks]
    apart = all(b - a >= (wide + next_wide) / 2 + GAP for (a, wide), (b, next_wide) in pairwise(places))
    inside = all(
        scale.start - EDGE <= at - wide / 2 and at + wide / 2 <= scale.end + EDGE for at, wide in places
    )
    return apart and inside


def time_name(moments: Sequence[datetime]) -> str:
    """The name of the axis: with the day where all moments are of one."""
    days = {f"{moment.astimezone(UTC):%Y-%m-%d}" for moment in moments}
    return f"time on {days.pop()} (UTC)" if len(days) == 1 else "date (UTC)"


def day(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"


MOST_ROWS = 12
ROW, COLUMNS = 66.0, 42.0
"""The height of a row, and of the highest column in it."""


def histogram(samples: Samples) -> Sketch | str:
    """A row for each replicate; the columns of all rows have one scale."""
    rows = samples.replicates[:MOST_ROWS]
    if not rows or not drawable(samples.edges[0], samples.edges[-1]):
        return f"{samples.title}: there is no sample to draw."
    medians = ", ".join(short(each.median) for each in rows)
    return Sketch(
        samples.title,
        f"{samples.axis} of {sum(each.n for each in rows)} samples in {len(rows)} replicates with the "
        f"medians {medians}. The table has the counts.",
        lambda frame: _Histogram(frame, samples, rows).drawing(len(samples.replicates) - len(rows)),
    )


@dataclass(frozen=True)
class _Histogram:
    frame: Frame
    samples: Samples
    rows: tuple[Counted, ...]

    def drawing(self, left_out: int) -> Drawing:
        scale = self._scale()
        most = max(max(each.counts) for each in self.rows) or 1
        bottom = ROW * len(self.rows) + 4
        parts: list[str] = [below(scale, 0.0, bottom)]
        parts += [self._row(place, each, scale, most) for place, each in enumerate(self.rows)]
        parts.append(name_below(self.samples.axis, scale, self.frame.width, bottom + 30, self.frame.width))
        height = bottom + TICKS_BELOW + LINE
        if left_out:
            height += LINE
            parts.append(text(0, height - 5, f"{left_out} more are in the table.", class_="c-faint"))
        return Drawing(height, tuple(parts))

    def _scale(self) -> Scale:
        edges, most = self.samples.edges, 5 if self.frame.is_narrow else 9
        return lying(
            lambda start, end: axis(edges[0], edges[-1], start, end, most=most, size=label_width),
            4.0,
            self.frame.width - 4,
            self.frame.width,
        )

    def _row(self, place: int, each: Counted, scale: Scale, most: int) -> Svg:
        """The name and the median stand above the columns."""
        top = ROW * place
        base = top + ROW - 2
        beyond = f", {each.beyond} beyond" if each.beyond else ""
        said = shortened(f"median {short(each.median)} of {each.n}{beyond}", self.frame.width - 60)
        room = self.frame.width - text_width(said) - 10
        median = scale(each.median)
        return group(
            "c-row",
            title(f"{each.label}: {said}"),
            element("path", d=self._columns(each, scale, most, base), class_="c-columns c-s1"),
            line(scale.start, base, scale.end, base, "c-base"),
            line(median, base - COLUMNS - 3, median, base, "c-median"),
            text(0, top + 13, each.label, class_="c-label", width=max(20.0, room)),
            text(self.frame.width, top + 13, said, class_="c-rest", anchor="end"),
        )

    def _columns(self, each: Counted, scale: Scale, most: int, base: float) -> str:
        """The outline of the columns, from the left to the right."""
        parts = [f"M{number(scale(self.samples.edges[0]))},{number(base)}"]
        for count, edge in zip(each.counts, self.samples.edges[1:], strict=True):
            parts.append(f"V{number(base - COLUMNS * count / most)}H{number(scale(edge))}")
        return "".join([*parts, f"V{number(base)}"])
