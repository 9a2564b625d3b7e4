"""Values over time with their 95% intervals, and a line where their level changes."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from optigpu.documents.views import History, HistoryPoint, LevelChange
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
    path,
    text,
    title,
    wrapped,
)
from optigpu.report.charts.svg.plane import (
    LINE,
    Extent,
    Plane,
    Scale,
    Tick,
    drawable,
    gutter,
    keep_apart,
    label_width,
    whisker,
)
from optigpu.report.formats import Grid, tabulated
from optigpu.report.numbers import interval, short
from optigpu.report.rows import heading
from optigpu.vocabulary import Better

MOST_POINTS = 200
"""The newest of them are drawn; the table has all."""
MOST_DOTS = 40
MOST_CHANGES = 8


def history(found: History, link: Link | None = None) -> Sketch | str:
    """A point for each result, the oldest first. `link` makes points links to their results."""
    points = [each for each in found.points if drawable(each.value)][-MOST_POINTS:]
    if not points:
        return f"{history_title(found)}: there is no valid result to draw yet."
    changes = [each for each in found.changes if each.measured_at >= points[0].measured_at][-MOST_CHANGES:]
    first, last = points[0], points[-1]
    span = (
        f"{heading(found.metric)} of {len(points)} results: {short(first.value)} on {day(first.measured_at)}"
    )
    said = [f"{day(each.measured_at)}: {change_text(each)}" for each in changes]
    return Sketch(
        history_title(found),
        ". ".join([f"{span}, {short(last.value)} on {day(last.measured_at)} (UTC)", *said]),
        lambda frame: _drawing(found, points, changes, frame, link),
    )


def _drawing(
    found: History,
    points: Sequence[HistoryPoint],
    changes: Sequence[LevelChange],
    frame: Frame,
    link: Link | None,
) -> Drawing:
    """A point for each result; of many the line alone."""
    plane = _plane(found, points, frame)
    places = [plane.at(each.measured_at.timestamp(), each.value) for each in points]
    crosses = (
        whisker(each.ci, plane.y, x, upright=True) for each, (x, _) in zip(points, places, strict=True)
    )
    dots: list[Svg] = []
    for each, (x, y) in zip(points, places, strict=True):
        said = f"{day(each.measured_at)}: {short(each.value)} {heading(found.metric)}"
        dot = element("circle", title(said), cx=x, cy=y, r=3.5, class_="c-point c-s1")
        dots.append(linked(link, each.result_id, said, dot))
    lines: list[Svg] = []
    for change in changes:
        at = plane.x(change.measured_at.timestamp())
        said = title(f"{day(change.measured_at)}: {change_text(change)}")
        lines.append(group(f"c-change {_look(change)}", said, line(at, plane.top, at, plane.bottom)))
    listed, height = _listed(changes, frame, plane.height + 6)
    better = "↑ better" if found.better is Better.HIGHER else "↓ better"
    parts = (
        *plane.axes(),
        text(frame.width, 11, better, class_="c-faint", anchor="end"),
        group("c-crosses", *crosses, hidden=True),
        path(places, "c-line c-s1"),
        *lines,
        *(dots if len(dots) <= MOST_DOTS else ()),
        listed,
    )
    return Drawing(height, parts)


def _plane(found: History, points: Sequence[HistoryPoint], frame: Frame) -> Plane:
    y = Extent(
        tuple(each.value for each in points),
        tuple(bound for each in points for bound in each.ci or ()),
        loose=True,
    )
    top, times = LINE + 8, [each.measured_at for each in points]
    upright = y.scale(top + (200.0 if frame.is_narrow else 240.0), top, most=6, upright=True)
    across = time_axis(times, gutter(upright), frame.width - 14, most=5 if frame.is_narrow else 9)
    return Plane(across, upright, time_name(times), heading(found.metric), frame)


def _look(each: LevelChange) -> str:
    return "c-gain" if each.improved else "c-loss"


def _listed(changes: Sequence[LevelChange], frame: Frame, y: float) -> tuple[Svg, float]:
    """The changes in words below the plot."""
    parts: list[str] = []
    for each in changes:
        parts.append(text(0, y + 11, "▲" if each.improved else "▼", class_=_look(each)))
        whole = f"{day(each.measured_at)[:10]}: {change_text(each)}"
        for words in wrapped(whole, frame.width - 20, 2, SMALL):
            parts.append(text(16, y + 11, words))
            y += LINE
    return group("c-changes", *parts), y


HOUR, DAY = 3600, 86400
_STEPS = (1, 5, 30, 60, 300, 1800, HOUR, 3 * HOUR, 12 * HOUR, DAY, 2 * DAY, 7 * DAY, 14 * DAY)
"""Seconds between ticks; more are months."""
_MONTHS = (1, 3, 12, 24, 60, 120, 600, 4800)
EDGE = 13.0
"""How far a label may reach beyond the axis."""


def time_axis(moments: Sequence[datetime], start: float, end: float, *, most: int) -> Scale:
    """From a little before the first moment to a little after the last; ticks lie inside. At least one is labelled."""
    seconds = [moment.timestamp() for moment in moments]
    low, high = min(seconds), max(seconds)
    room = (high - low) * 0.02 or 1800.0
    low, high = low - room, high + room
    for ticks in _choices(low, high):
        scale = Scale(low, high, start, end, ticks)
        places = [(scale(tick.value), label_width(tick.text) / 2) for tick in ticks]
        is_inside = all(start - EDGE <= at - half and at + half <= end + EDGE for at, half in places)
        if ticks and len(ticks) <= most and is_inside and keep_apart(scale, label_width):
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
            yield tuple(Tick(at, _text(_utc(at), step)) for at in range(first, int(high) + 1, step))
    for months in _MONTHS:
        first, last = _utc(low).year * 12 // months * months, _utc(high).year * 12 + 12
        begins = (divmod(count, 12) for count in range(max(12, first), last, months))
        ticks = (datetime(year, month + 1, 1, tzinfo=UTC) for year, month in begins)
        yield tuple(
            Tick(at.timestamp(), f"{at:%Y}" if at.month == 1 else f"{at:%b}")
            for at in ticks
            if low <= at.timestamp() <= high
        )


def _text(moment: datetime, step: int) -> str:
    if step >= DAY or (moment.hour, moment.minute, moment.second) == (0, 0, 0):
        return f"{moment:%b} {moment.day}"
    return f"{moment:%H:%M:%S}" if step < 60 else f"{moment:%H:%M}"


def time_name(moments: Sequence[datetime]) -> str:
    """The name of the axis: with the day where all moments are of one."""
    days = {f"{moment.astimezone(UTC):%Y-%m-%d}" for moment in moments}
    return f"time on {days.pop()} (UTC)" if len(days) == 1 else "date (UTC)"


def day(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M}"


MOST_VERSIONS = 3
"""Packages that a change names."""


def history_table(history: History) -> Grid:
    """A row for each result, the newest first; a change of the level is written beside the first result after it."""
    changes = {each.result_id: change_text(each) for each in history.changes}
    grid = tabulated(
        history_title(history),
        history.points[::-1],
        {
            "measured (UTC)": lambda each: f"{each.measured_at:%Y-%m-%d %H:%M}",
            f"{heading(history.metric)}:": lambda each: short(each.value),
            "95% interval:": lambda each: interval(each.ci),
            "change": lambda each: changes.get(each.result_id, ""),
            "warnings": lambda each: ", ".join(each.warnings),
        },
    )
    return grid.without_empty_columns()


def history_title(history: History) -> str:
    return f"{history.label} on {history.hardware}"


def change_text(change: LevelChange) -> str:
    """`12.1% higher (worse): torch 2.12 → 2.13`."""
    size = f"{abs(change.ratio - 1):.1%} {'higher' if change.ratio > 1 else 'lower'}"
    named = [f"{name} {old or 'none'} → {new or 'none'}" for name, (old, new) in change.versions.items()]
    more = len(named) - MOST_VERSIONS
    what = ", ".join(named[:MOST_VERSIONS] + ([f"{more} more versions"] if more > 0 else []))
    return f"{size} ({'better' if change.improved else 'worse'}): {what or 'no version changed'}"
