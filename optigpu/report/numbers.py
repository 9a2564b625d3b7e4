"""Numbers as text. A missing one is "-"."""

from collections.abc import Sequence

from optigpu.documents.result import Gain
from optigpu.vocabulary import Document

MISSING = "-"


def short(number: float | None) -> str:
    """At most four significant digits, without an exponent for numbers of usual size."""
    if number is None:
        return MISSING
    magnitude = abs(number)
    if magnitude >= 1000:
        return f"{number:,.0f}"
    if magnitude >= 100:
        return f"{number:.0f}"
    if magnitude >= 10:
        return f"{number:.1f}"
    return f"{number:.3g}" if magnitude < 1 else f"{number:.2f}"


def with_interval(metric: Document | None, scale: float = 1.0) -> str:
    """`value ±half`, half being the longer side of the 95% interval; `metric` is a summary as JSON."""
    if not metric or metric.get("value") is None:
        return MISSING
    value = metric["value"] * scale
    interval: Sequence[float] | None = metric.get("ci")
    if not interval:
        return short(value)
    half = max(interval[1] * scale - value, value - interval[0] * scale)
    return f"{short(value)} ±{half:.2g}" if half < 100 else f"{short(value)} ±{short(half)}"


def scaled(metric: Document | None, scale: float) -> str:
    """The value alone, in another unit."""
    return MISSING if not metric or metric.get("value") is None else short(metric["value"] * scale)


def ratio(gain: Gain | None) -> str:
    """`1.23x [1.20, 1.26]`: a ratio with its 95% interval."""
    if gain is None:
        return MISSING
    interval = f" [{gain.ci[0]:.2f}, {gain.ci[1]:.2f}]" if gain.ci else ""
    return f"{gain.ratio:.2f}x{interval}"


def duration(seconds: float) -> str:
    """Whole seconds as `m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"
