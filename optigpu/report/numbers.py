"""Numbers as text. A missing one is "-"."""

import math
from collections.abc import Sequence

from optigpu.documents.result import Gain, Payback
from optigpu.vocabulary import Document

MISSING = "-"
NOT_VALID = " !"
"""Follows a figure or a ratio that is not valid."""
LOPSIDED = 4 / 3
"""An interval is written by its bounds where one side is more than so many times the other: ± would hide it."""


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


def with_error(value: float, interval: Sequence[float] | None) -> str:
    """`602 ±7%`: with the longer side of the 95% interval, where there is one."""
    if not (interval and value):
        return short(value)
    return f"{short(value)} ±{max(abs(bound - value) for bound in interval) / value:.0%}"


def interval(ci: Sequence[float] | None) -> str:
    """`[41.0, 47.3]`; blank where there is none."""
    return "" if ci is None else f"[{short(ci[0])}, {short(ci[1])}]"


def with_interval(metric: Document | None, scale: float = 1.0) -> str:
    """`42.1 ±1.5`, with the longer side of the 95% interval, or `42.1 [41.0, 47.3]` where its sides differ by more than
    a third. `metric` is a summary as JSON."""
    if not metric or metric.get("value") is None:
        return MISSING
    value = metric["value"] * scale
    if not metric.get("ci"):
        return short(value)
    low, high = (bound * scale for bound in metric["ci"])
    shorter, longer = sorted((value - low, high - value))
    if longer > LOPSIDED * shorter:
        _, _, shown = short(value).partition(".")
        decimals = max(
            len(shown), math.ceil(math.log10(4 / longer))
        )  # as the value, or what shows the longer side
        return f"{short(value)} [{low:,.{decimals}f}, {high:,.{decimals}f}]"
    return f"{short(value)} ±{longer:.2g}" if longer < 100 else f"{short(value)} ±{short(longer)}"


def scaled(metric: Document | None, scale: float) -> str:
    """The value alone, in another unit."""
    return MISSING if not metric or metric.get("value") is None else short(metric["value"] * scale)


def ratio(gain: Gain | None) -> str:
    """`1.23x [1.20, 1.26]`: a ratio with its 95% interval, marked if it is not valid."""
    if gain is None:
        return MISSING
    interval = f" [{gain.ci[0]:.2f}, {gain.ci[1]:.2f}]" if gain.ci else ""
    return f"{gain.ratio:.2f}x{interval}{'' if gain.valid else NOT_VALID}"


def payback(found: Payback | None) -> str:
    """`120 [100, 150]`: steps with their 95% interval, or "never"; blank where nothing was compiled."""
    if found is None:
        return ""
    if found.steps is None:
        return "never"
    interval = f" [{short(found.ci[0])}, {short(found.ci[1])}]" if found.ci else ""
    return f"{short(found.steps)}{interval}"


def duration(seconds: float) -> str:
    """Whole seconds as `m:ss` or `h:mm:ss`."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PREFIXED_FROM = 10_000
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def prefixed(numbers: Sequence[float], step: float) -> list[str]:
    """Numbers of an axis `step` apart, with as many decimals as that needs and one SI prefix: `0`, `20k`, `40k`."""
    largest = max(map(abs, numbers), default=0.0)
    if largest >= 1e16 or (step and step < 1e-6):
        return ["0" if number == 0 else f"{number:.6g}" for number in numbers]
    prefixes = _PREFIXES if largest >= _PREFIXED_FROM else ()
    unit, letter = next(((size, each) for size, each in prefixes if largest >= size), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9)) if step else 2
    return ["0" if number == 0 else f"{number / unit:,.{decimals}f}{letter}" for number in numbers]


def superscript(number: float) -> str:
    """A number of a logarithmic axis: `0.5`, `200`, `20k`, `2·10⁻⁶`."""
    power = math.floor(math.log10(number) + 1e-9)
    if -3 <= power < 4:
        return f"{number:g}" if number < 1000 else f"{number:,.0f}"
    if 4 <= power < 15:
        unit, letter = next((size, each) for size, each in _PREFIXES if number >= size * (1 - 1e-9))
        return f"{number / unit:.4g}{letter}"
    factor = number / 10.0**power
    times = "" if f"{factor:.3g}" == "1" else f"{factor:.3g}·"
    return f"{times}10{str(power).translate(_SUPERSCRIPTS)}"
