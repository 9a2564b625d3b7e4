"""An axis of time, in UTC: ticks at whole minutes, hours, days, months or years."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise

from optigpu.report.charts.svg.scales import GAP, Scale, Tick
from optigpu.report.charts.svg.words import SMALL, text_width

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
        if ticks and len(ticks) <= most and _keep_apart(scale):
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
    for number in range(begin.year * 12 // months * months, end.year * 12 + 12, months):
        year, month = divmod(number, 12)
        if 1 <= year <= 9999:
            at = datetime(year, month + 1, 1, tzinfo=UTC)
            if begin <= at <= end:
                yield Tick(at.timestamp(), f"{at:%Y}" if month == 0 else f"{at:%b}")


def _keep_apart(scale: Scale) -> bool:
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
