"""A figure as a bar with its interval: where it ends, and where its whiskers stand."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.documents.result import Gain, MetricSummary
from optigpu.report.numbers import ratio, with_interval
from optigpu.vocabulary import Document


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


def speedup_text(baseline: MetricSummary, candidate: MetricSummary | Document) -> FigureText | None:
    """`23.1x` and its interval; None where there is no ratio. A candidate may be a summary as it was stored."""
    from optigpu.statistics.compare import speedup  # here, because it loads numpy
    from optigpu.statistics.stored import StoredSummary

    found = speedup(
        *(StoredSummary.model_validate(side, from_attributes=True) for side in (baseline, candidate))
    )
    if found is None:
        return None
    text, _, spread = ratio(Gain(ratio=found[0], ci=found[1], compared_with=0)).partition(" ")
    return FigureText(text, spread)


def bars(figures: Sequence[MetricSummary]) -> list[Bar]:
    """From 0, on one scale, so that their lengths compare."""
    ends = [figure.ci[1] if figure.ci else figure.value or 0.0 for figure in figures]
    most = max([0.0, *ends]) or 1.0
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
    summary = {"value": figure.value, "ci": figure.ci} if figure else None
    text, _, spread = with_interval(summary, scale).partition(" ")
    return FigureText(text, spread)
