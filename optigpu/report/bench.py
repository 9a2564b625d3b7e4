"""The line that sums a machine's bench up, to be quoted."""

from collections.abc import Sequence

from optigpu.documents.result import Attribution
from optigpu.report.numbers import NOT_VALID, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document

Measured = tuple[Sequence[Document], Attribution]
"""The results of one of bench's jobs, and what its techniques bought."""


def bench_line(jobs: Sequence[Measured]) -> str:
    """The best figure of each job, then when, where and with what they were measured."""
    figures = [_figure(results, attribution) for results, attribution in jobs]
    origin = origin_line([result for results, _ in jobs for result in results])
    parts = [figure for figure in figures if figure]
    return f"{'; '.join(parts)}. {origin}" if parts else "Nothing could be measured."


def _figure(results: Sequence[Document], attribution: Attribution) -> str | None:
    """For example "preset:gpt2, native_decode: 602 [558, 635] tokens/s, 22.9x the baseline"."""
    best = max(results, key=_rank, default=None)
    if best is None or _value(best) is None:
        return None
    variant = best["variant"]
    subject = variant["model"] or variant["workload"]["kind"]
    speed = f"{with_interval(best['metrics'][variant['primary_metric']])} {heading(attribution.metric)}"
    mark = "" if best["verdict"]["valid"] else NOT_VALID
    row = next((each for each in attribution.rows if each.index == variant["index"]), None)
    gain = f", {row.speedup.ratio:.1f}x the baseline" if row and row.speedup else ""
    return f"{subject}, {variant['label']}: {speed}{mark}{gain}"


def _rank(result: Document) -> tuple[bool, float]:
    """Valid figures before others, then the larger: all of bench's are better when larger."""
    return bool(result["verdict"]["valid"]), _value(result) or 0.0


def _value(result: Document) -> float | None:
    value: float | None = result["metrics"][result["variant"]["primary_metric"]]["value"]
    return value
