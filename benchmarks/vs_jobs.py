"""A case of speed as jobs: stacks of every backend side by side, so that each row has an interval and a verdict."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.stacks import Case, Stack, details_of, spec_of
from benchmarks.vs_cases import TIMED, Speed, name_of
from optigpu.documents.events import Event
from optigpu.documents.result import Outcome, Samples
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.statistics.intervals import paired_ratio, ratio
from optigpu.vocabulary import OptiGPUError

Bounds = tuple[float, float]
FIRST = 2
"""How many times the share of the others the first job has of the time: it has what the goals are about."""


@dataclass(frozen=True)
class Line:
    """A row of a case's table. A stack that could not be measured has a `reason` and no figures.

    `rates` are the medians of its processes and `rate` the result's own figure, in tokens/s; `ratio` is against the
    first stack of its job. `verdict` lists what is wrong with the result, `warnings` what a reader should know; `notes`
    explain the verdict. `ours` and `ours_verdict` are the rates and the verdict of the goals' stack in the same job;
    `ours_over` is how many times as fast as this row it is, process by process, where turns say so.
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
    notes: tuple[str, ...] = ()
    variant_digest: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    ours: tuple[float, ...] = ()
    ours_over: tuple[float, ...] = ()
    ours_verdict: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaseFigures:
    """The rows of cases by their names, and the jobs that they come from: posted to a service, each takes part in its
    leaderboard.
    """

    lines: dict[str, list[Line]]
    jobs: list[JobSpec]


def measured(
    reference: Stack, speed: Speed, measure: dict[str, Any], on_event: Callable[[Event], None]
) -> CaseFigures:
    """Jobs of the reference and TIMED with the other stacks, group by group; their own rows are those of the first job.

    Each job may take its share of the time that is left, by its processes, and the first one FIRST times as much.
    Raises OptiGPUError if the first job cannot be.
    """
    found = CaseFigures({name_of(case): [] for case in speed.cases}, [])
    ends = time.monotonic() + speed.budget_s
    groups = list(_groups(reference, speed))
    for group, together in enumerate(groups):
        mine, rest = len(together) * (1 if group else FIRST), sum(map(len, groups[group + 1 :]))
        share = mine / (mine + rest)
        limits = {"timeout_s": share * max(ends - time.monotonic(), 1.0)}
        try:
            report = run(spec_of(together, speed.cases[0], measure, limits), on_event)
        except OptiGPUError as error:
            if not group:
                raise
            for lines in found.lines.values():
                lines += [Line(stack.name, group, reason=str(error)) for stack in together[2:]]
            continue
        for case in speed.cases:
            lines = lines_of(report, together, case, group)
            found.lines[name_of(case)] += lines[2:] if group else lines
        found.jobs.append(report.spec)
    return found


def _groups(reference: Stack, speed: Speed) -> Iterator[list[Stack]]:
    others = [stack for stack in speed.stacks if stack != reference]
    for start in range(0, len(others), speed.at_once):
        yield [reference, TIMED, *others[start : start + speed.at_once]]


def lines_of(report: Report, stacks: Sequence[Stack], case: Case, group: int) -> list[Line]:
    """A row for each stack of a job, whose variants are in the order of the stacks; the second is the goals' own."""
    outcomes = {outcome.index: outcome for outcome in report.outcomes}
    first, ours = outcomes[0], outcomes[1]
    return [_line(stack, outcomes[index], (first, ours), case, group) for index, stack in enumerate(stacks)]


def _line(stack: Stack, outcome: Outcome, beside: tuple[Outcome, Outcome], case: Case, group: int) -> Line:
    first, ours = beside
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
        notes=result.verdict.reason_notes,
        variant_digest=result.variant.variant_digest,
        details=details_of(result.facts.model_dump(mode="json")),
        ours=_rates(ours, case) if ours.result else (),
        ours_over=_of_turns(ours, outcome, case),
        ours_verdict=tuple(map(str, ours.result.verdict.reasons)) if ours.result else (),
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
    sides: tuple[Samples, Samples] = (ours.samples[_metric(case)], theirs.samples[_metric(case)])
    above, below = sides if case.measure == "decode" else reversed(sides)
    if _were_together(ours, theirs):
        return paired_ratio(above, below, _of_turns(ours, theirs, case))
    return ratio(above, below)


def _of_turns(ours: Outcome, theirs: Outcome, case: Case) -> tuple[float, ...]:
    """How many times as fast as theirs ours is, process by process; empty where turns do not say."""
    if ours.result is None or not _were_together(ours, theirs):
        return ()
    return ours.result.metrics[_metric(case)].gains.get(theirs.index, ())


def _were_together(ours: Outcome, theirs: Outcome) -> bool:
    return ours.result is not None and theirs.index in ours.result.facts.side_by_side
