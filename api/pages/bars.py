"""A figure as a bar with its interval: where it ends, and where its whiskers stand."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.documents.result import MetricSummary
from optigpu.report.numbers import with_interval


@dataclass(frozen=True)
class Bar:
    """Percent of the width. Without an interval there are no whiskers."""

    end: float
    low: float = 0.0
    high: float = 0.0
    sure: bool = False


@dataclass(frozen=True)
class FigureText:
    """A figure, and its interval as text."""

    text: str
    spread: str


def bars(figures: Sequence[MetricSummary]) -> list[Bar]:
    """From 0, on one scale, so that their lengths compare."""
    ends = [figure.ci[1] if figure.ci else figure.value or 0.0 for figure in figures]
    most = max(ends, default=0.0) or 1.0
    return [_bar(figure, 100.0 / most) for figure in figures]


def _bar(figure: MetricSummary, scale: float) -> Bar:
    end = _within((figure.value or 0.0) * scale)
    if figure.ci is None:
        return Bar(end)
    low, high = (_within(bound * scale) for bound in figure.ci)
    return Bar(end, low, high, sure=True)


def _within(percent: float) -> float:
    return round(min(100.0, max(0.0, percent)), 2)


def figure_text(figure: MetricSummary | None, scale: float = 1.0) -> FigureText:
    """`42.1` and `±1.5`; a missing one is "-"."""
    text, _, spread = with_interval(figure.model_dump() if figure else None, scale).partition(" ")
    return FigureText(text, spread)
