"""What a gate and a search say: a document for programs, a comment in Markdown, a few lines."""

import math
import statistics
from typing import Literal

from optigpu.gate.bisect import Found
from optigpu.gate.decision import FEWEST_PAIRS, Verdict
from optigpu.gate.turns import Outcome, Rules, Side
from optigpu.report.formats import Grid, columns, markdown
from optigpu.report.numbers import duration, short
from optigpu.vocabulary import Better, Frozen

STATUS = {Verdict.NO_WORSE: 0, Verdict.WORSE: 1, Verdict.CANNOT_SAY: 2}
"""The exit status of each verdict."""
Known = tuple[float, float] | None
"""An interval; None if there were too few pairs for one."""


class GateReport(Frozen):
    """A gate's outcome. A loss is a share of the base's figure: 0.05 is 5% worse, -0.05 is 5% better. A ratio is that
    of head to base."""

    schema_version: Literal[1] = 1
    verdict: Verdict
    exit_status: int
    metric: str
    better: Better
    worse_than: float
    ratio: float
    ratio_ci: Known
    loss: float
    loss_ci: Known
    smallest_loss_found: float | None
    base: str
    head: str
    base_figures: tuple[float, ...]
    head_figures: tuple[float, ...]
    seconds: float
    minutes: float
    repeat: str


def report_of(outcome: Outcome, sides: tuple[Side, Side], rules: Rules, repeat: str) -> GateReport:
    """The outcome in shares and ratios; `repeat` is the command that does the same again."""
    loss, interval = outcome.loss, _interval(outcome, rules)
    low, high = sorted(1 + (-bound if rules.is_rate else bound) for bound in interval or (0.0, 0.0))
    return GateReport(
        verdict=outcome.verdict,
        exit_status=STATUS[outcome.verdict],
        metric=rules.wanted.metric or "seconds",
        better=rules.wanted.better,
        worse_than=rules.worse_than,
        ratio=rules.ratio(loss.estimate),
        ratio_ci=interval and (low, high),
        loss=rules.share(loss.estimate),
        loss_ci=interval,
        smallest_loss_found=None if loss.findable is None else rules.share(loss.findable),
        base=sides[0].label,
        head=sides[1].label,
        base_figures=outcome.base,
        head_figures=outcome.head,
        seconds=outcome.seconds,
        minutes=rules.time_s / 60,
        repeat=repeat,
    )


def _interval(outcome: Outcome, rules: Rules) -> Known:
    low, high = outcome.loss.low, outcome.loss.high
    return (rules.share(low), rules.share(high)) if math.isfinite(low) else None


def comment(report: GateReport) -> str:
    """The report as Markdown."""
    better = {Better.HIGHER: "more is better", Better.LOWER: "less is better"}[report.better]
    sides = (("base", report.base, report.base_figures), ("head", report.head, report.head_figures))
    interval = f"[{report.ratio_ci[0]:.4g}, {report.ratio_ci[1]:.4g}]" if report.ratio_ci else UNKNOWN
    grid = Grid(
        "",
        columns("", "state", f"{report.metric}, median ({better}):"),
        tuple((name, label, short(statistics.median(figures))) for name, label, figures in sides),
        (
            f"Ratio of head to base: **{report.ratio:.4g}**, interval {interval}, by {len(report.base_figures)} pairs "
            f"of runs in {duration(report.seconds)} of at most {duration(60 * report.minutes)}.",
            _findable(report),
        ),
    )
    change = f"{report.metric} {abs(report.loss):.1%} {'worse' if report.loss > 0 else 'better'}"
    limit = f"the limit is {100 * report.worse_than:.4g}% worse"
    title = f"{report.verdict}. {change}, interval of the loss {_shown(report.loss_ci)}; {limit}."
    return f"### Gate: {title}\n\n{markdown(grid)}\nRepeat it:\n\n```\n{report.repeat}\n```\n"


UNKNOWN = "unknown"


def _findable(report: GateReport) -> str:
    if report.smallest_loss_found is not None:
        return (
            "The smallest loss that this run, in the whole of its time, would have found four times of five: "
            f"**{report.smallest_loss_found:.1%}**."
        )
    pairs = len(report.base_figures)
    minutes = math.ceil(report.minutes * (FEWEST_PAIRS + 1) / pairs)
    return (
        f"{pairs} pairs of runs fitted into the time, and finding a loss needs at least {FEWEST_PAIRS}: "
        f"make the command shorter, or give --minutes {minutes}."
    )


def _shown(interval: Known) -> str:
    return f"[{interval[0]:.1%}, {interval[1]:.1%}]" if interval else UNKNOWN


def found_text(found: Found) -> str:
    """Where a search ended."""
    loss = found.rules.share(found.outcome.loss.estimate)
    by = f"{loss:.1%} {_shown(_interval(found.outcome, found.rules))}"
    if found.exit_status == 1:
        return f"{found.first_bad.shown} is no worse than {found.last_good.shown}: the loss is {by}."
    after = f"after {found.asked} comparisons"
    if found.is_cause:
        return (
            f"The first bad commit is {found.first_bad.shown}, {after}.\n"
            f"Its loss is {by} of {found.last_good.shown}, the commit before it."
        )
    names = "\n".join(f"  {commit.shown}" for commit in (*found.between, found.first_bad))
    return (
        f"One of these commits is the first bad one, {after}; the last of them had a loss of {by}:\n{names}"
    )
