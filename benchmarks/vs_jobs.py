"""A case of speed as jobs: stacks of every backend side by side, so that each row has an interval and a verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.stacks import Case, Stack, details_of, spec_of
from optigpu.documents.events import Event
from optigpu.documents.result import Outcome, Result, Samples
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.statistics.intervals import paired_ratio, ratio

Bounds = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A row of a case's table. A stack that could not be measured has a `reason` and no figures.

    `rates` are the medians of its processes and `rate` the result's own figure, in tokens/s; `ratio` is against the
    first stack of its job. `verdict` lists what is wrong with the result, `warnings` what a reader should know.
    """

    name: str
    group: int
    reason: str | None = None
    rates: tuple[float, ...] = ()
    rate: float | None = None
    interval: Bounds | None = None
    ratio: float | None = None
    ratio_interval: Bounds | None = None
    weight_bytes: int | None = None
    valid: bool | None = None
    verdict: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    variant_digest: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CaseFigures:
    """The rows of a case, and the jobs that they come from: posted to a service, each takes part in its leaderboard."""

    lines: list[Line]
    jobs: list[JobSpec]


def measured(
    stacks: Sequence[Stack],
    case: Case,
    at_once: int,
    measure: dict[str, Any],
    on_event: Callable[[Event], None],
) -> CaseFigures:
    """Groups of `at_once` stacks with the first stack beside each, whose own row is that of the first group."""
    reference, *others = stacks
    found = CaseFigures([], [])
    for group, start in enumerate(range(0, len(others), at_once)):
        together = [reference, *others[start : start + at_once]]
        report = run(spec_of(together, case, measure), on_event)
        lines = lines_of(report, together, case, group)
        found.lines.extend(lines[1:] if group else lines)
        found.jobs.append(report.spec)
    return found


def lines_of(report: Report, stacks: Sequence[Stack], case: Case, group: int) -> list[Line]:
    """A row for each stack of a job, whose variants are in the order of the stacks."""
    outcomes = {outcome.index: outcome for outcome in report.outcomes}
    first = outcomes[0]
    return [_line(stack, outcomes[index], first, case, group) for index, stack in enumerate(stacks)]


def _line(stack: Stack, outcome: Outcome, first: Outcome, case: Case, group: int) -> Line:
    result = outcome.result
    if result is None:
        return Line(stack.name, group, reason=outcome.reason or "It was not measured.")
    rates = _rates(outcome, case)
    own = result.metrics[_metric(case)]
    quotient, bounds = _against(outcome, first, case) if first.result else (None, None)
    weights = result.metrics["weight_bytes"].value
    return Line(
        name=stack.name,
        group=group,
        rates=rates,
        rate=sum(rates) / len(rates),
        interval=_as_rate(own.ci, case),
        ratio=quotient,
        ratio_interval=bounds,
        weight_bytes=None if weights is None else int(weights),
        valid=result.verdict.valid,
        verdict=tuple(map(str, result.verdict.reasons)),
        warnings=tuple(map(str, result.verdict.warnings)),
        variant_digest=result.variant.variant_digest,
        details=details_of(result.facts.model_dump(mode="json")),
    )


def _metric(case: Case) -> str:
    return "tokens_per_s" if case.measure == "decode" else "ttft_s"


def _rates(outcome: Outcome, case: Case) -> tuple[float, ...]:
    assert outcome.result is not None
    medians = outcome.result.metrics[_metric(case)].per_replicate
    return medians if case.measure == "decode" else tuple(case.prompt_tokens / seconds for seconds in medians)


def _as_rate(bounds: Bounds | None, case: Case) -> Bounds | None:
    """In tokens/s; None where seconds may be 0, so that the rate has no upper bound."""
    if bounds is None or case.measure == "decode":
        return bounds
    low, high = bounds
    return (case.prompt_tokens / high, case.prompt_tokens / low) if low > 0 else None


def _against(ours: Outcome, theirs: Outcome, case: Case) -> tuple[float, Bounds | None]:
    """Ours over theirs, in pairs of processes that were resident together."""
    result: Result | None = ours.result
    assert result is not None
    sides: tuple[Samples, Samples] = (ours.samples[_metric(case)], theirs.samples[_metric(case)])
    above, below = sides if case.measure == "decode" else reversed(sides)
    compared = paired_ratio if theirs.index in result.facts.side_by_side else ratio
    return compared(above, below)
