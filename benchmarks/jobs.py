"""Jobs of stacks side by side: what they need before, their progress, and a row with an interval and a verdict each."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rich.progress import track

from benchmarks.stacks import Case, Stack, details_of, spec_of
from optigpu.child.messages import Ready
from optigpu.conductor.outcome import builds_of
from optigpu.conductor.processes.child import ask
from optigpu.conductor.session import Session, open_session
from optigpu.documents.events import Event, as_document
from optigpu.documents.result import Outcome, Samples
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.measure import REPLICATE, Report, never, run
from optigpu.report.formats import Grid, columns, console
from optigpu.report.progress import RunProgress
from optigpu.statistics.intervals import paired_ratio, ratio
from optigpu.vocabulary import Document, OptiGPUError

TEXT = "wikitext-2"
Bounds = tuple[float, float]
FIRST = 2
"""How many times the share of the others the first job has of the time: it has what goals are about."""


def silent(_: Event) -> None:
    """Ignores events."""


def session_of(spec: JobSpec, variants: int) -> AbstractContextManager[Session]:
    """A session for so many variants, set up as a run does, without its time limit."""
    return open_session(spec, range(variants), silent, program=REPLICATE, cancelled=never)


def run_shown(spec: JobSpec) -> Report:
    """Runs a job with its progress on stderr."""
    with RunProgress(console(stderr=True)) as progress:
        return run(spec, lambda event: progress.show(event.kind, as_document(event)))


def convert(specs: Sequence[JobSpec]) -> int:
    """Has each variant's process load its model once, which writes what its engine reads; prints why one cannot.

    What a job says of the engine's library is counted as well, and kept: it takes seconds to a minute. Returns 0.
    """
    problems = [problem for spec in specs for problem in _converted(spec)]
    print("\n".join(problems) or "All engines have their files.")
    return 0


def _converted(spec: JobSpec) -> Iterator[str]:
    variants = variants_of(spec)
    with session_of(spec, variants=len(variants)) as session:
        for variant in track(variants, f"converting {spec.model}", console=console(stderr=True)):
            try:
                with session.child(variant) as child:
                    ready = ask(child, session.assignment(variant, 0), Ready, session.progress)
                builds_of(variant, session.environment, ready.facts)
            except OptiGPUError as error:
                yield f"{variant.label}: {error}"


@dataclass(frozen=True)
class Line:
    """A row of a case's table. A stack that could not be measured has a `reason` and no figures.

    `rates` are the medians of its processes and `rate` the result's own figure, in tokens/s; `ratio` is against the
    first stack of its job. `verdict` lists what is wrong with the result, `warnings` what a reader should know; `notes`
    explain the verdict. `ours` and `ours_verdict` are the rates and the verdict of the goals' stack in the same job;
    `ours_over` is how many times as fast as this row it is, process by process, where turns say so. A row that is
    `left_out` was not asked for.
    """

    name: str
    group: int | None = None
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
    left_out: bool = False


@dataclass(frozen=True)
class Figures:
    """The rows of cases by their names, and the jobs that they come from: posted to a service, each takes part in its
    leaderboard.
    """

    lines: dict[str, list[Line]]
    jobs: list[JobSpec]


def measured(
    cases: Sequence[Case],
    always: Sequence[Stack],
    others: Sequence[Stack],
    at_once: int,
    budget_s: float,
    measure: dict[str, Any],
) -> Figures:
    """Jobs of `always` with `at_once` of the others, whose memory must fit beside them.

    One request gives the figures of all cases. `always` has its rows from the first job; the last of it is "ours". Each
    job may take its share of the time that is left, by its processes, and the first one FIRST times as much. Raises
    OptiGPUError if the first job cannot be.
    """
    found = Figures({case.name: [] for case in cases}, [])
    ends = time.monotonic() + budget_s
    groups = [[*always, *others[start : start + at_once]] for start in range(0, len(others), at_once)]
    for group, together in enumerate(groups):
        mine, rest = len(together) * (1 if group else FIRST), sum(map(len, groups[group + 1 :]))
        limits = {"timeout_s": mine / (mine + rest) * max(ends - time.monotonic(), 1.0)}
        begins = len(always) if group else 0
        try:
            asked = cases[0]
            report = run_shown(spec_of(together, asked.model, asked.shape, measure=measure, limits=limits))
        except OptiGPUError as error:
            if not group:
                raise
            for lines in found.lines.values():
                lines += [Line(stack.name, group, reason=str(error)) for stack in together[begins:]]
            continue
        outcomes = report.outcomes
        beside = (outcomes[0], outcomes[len(always) - 1])
        for case in cases:
            found.lines[case.name] += [
                _line(stack, outcome, beside, case, group)
                for stack, outcome in zip(together[begins:], outcomes[begins:], strict=True)
            ]
        found.jobs.append(report.spec)
    return found


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


def grid_of(
    lines: Sequence[Document], heading: str, beside: Mapping[str, str], published: Mapping[str, str]
) -> Grid:
    """The rows as a table, and what others published; `beside` is the text of the last column, by the row's name."""
    rows = [_cells(line, beside.get(line["name"], "")) for line in lines]
    rows += [(name, "", text, "", "", "") for name, text in published.items()]
    headings = columns("what", "tokens/s:", f"x {lines[0]['name']}:", "95% interval:", "MB:", f"{heading}:")
    return Grid("", headings, tuple(rows))


def _cells(line: Document, beside: str) -> tuple[str, ...]:
    if line["reason"]:
        return (line["name"], "", line["reason"], "", "", "")
    ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
    return (line["name"], f"{line['rate']:.1f}", ratio, _spread(line), megabytes(line), beside)


def _spread(line: Document) -> str:
    """The ratio's interval with what is wrong with the result; in older files of a peer in turns the lowest and the
    highest ratio."""
    if "ratios" in line:
        return f"{min(line['ratios']):.2f}..{max(line['ratios']):.2f} of {len(line['ratios'])} turns"
    bounds = line["ratio_interval"]
    marks = [f"NOT valid: {', '.join(line['verdict'])}"] if line["verdict"] else []
    spread = [f"{bounds[0]:.2f}..{bounds[1]:.2f}"] if bounds else []
    return "; ".join(spread + marks + list(line["warnings"]))


def megabytes(line: Document) -> str:
    """Of the weights."""
    return "" if line["weight_bytes"] is None else f"{line['weight_bytes'] / 1e6:.1f}"
