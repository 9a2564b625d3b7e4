"""Figures, times and names as the pages write them: filters of the templates."""

import re
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from optigpu.documents.views import BoardName, History
from optigpu.report.leaderboard import why_no_quality, workload_text
from optigpu.report.numbers import short
from optigpu.report.rows import heading
from optigpu.vocabulary import METRICS, Document

if TYPE_CHECKING:
    from markupsafe import Markup

LONGEST = 120
"""Characters of a name that are shown."""


def with_code(text: str) -> "Markup":
    """The text escaped, with what stands between backticks as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def day(at: datetime) -> str:
    return at.strftime("%Y-%m-%d")


def moment(at: datetime) -> str:
    return at.strftime("%Y-%m-%d %H:%M UTC")


def cut(text: object, longest: int = LONGEST) -> str:
    """At most so many characters; a cut text ends with an ellipsis."""
    whole = str(text)
    return whole if len(whole) <= longest else whole[: longest - 1] + "…"


def spaced(name: str) -> str:
    """A name of the vocabulary as words: `few_samples` as `few samples`."""
    return name.replace("_", " ")


def quantity(value: float | None) -> str:
    """Bytes as MB or GB."""
    if value is None:
        return short(None)
    return f"{short(value * 1e-9)} GB" if value >= 1e9 else f"{short(value * 1e-6)} MB"


def scaled(value: float | None, scale: float) -> str:
    """A figure in another unit."""
    return short(None if value is None else value * scale)


def percent(share: float | None) -> str:
    """Two decimals: losses are tenths of a percent."""
    return short(None) if share is None else f"{100 * share:.2f}%"


def workload_line(board: BoardName) -> str:
    """The workload and the model of a board on one line."""
    return cut(workload_text(board.workload, board.model))


def variant_line(variant: Document) -> str:
    """The same of a stored result's variant."""
    return cut(workload_text(variant["workload"], variant["model"]))


def history_line(history: History) -> str:
    """The same of a history."""
    return cut(workload_text(history.workload, history.model))


def metric_heading(name: str) -> str:
    """A metric's heading; the name itself if this version does not know it."""
    return heading(name) if name in METRICS else name


FILTERS: dict[str, Callable[..., object]] = {
    "with_code": with_code,
    "day": day,
    "moment": moment,
    "cut": cut,
    "spaced": spaced,
    "short": short,
    "quantity": quantity,
    "percent": percent,
    "scaled": scaled,
    "heading": metric_heading,
    "variant_line": variant_line,
    "history_line": history_line,
    "workload_line": workload_line,
    "why_no_quality": why_no_quality,
}
