"""What a gate says as Markdown, and what a search says in a few lines."""

import math
import statistics

from optigpu.documents.gates import GateOutcome, GateVerdict
from optigpu.gate.bisect import Found
from optigpu.gate.decision import FEWEST_PAIRS
from optigpu.report.formats import Grid, columns, duration, markdown, short
from optigpu.vocabulary import Better

UNKNOWN = "unknown"


def comment(outcome: GateOutcome) -> str:
    """The outcome as Markdown."""
    better = {Better.HIGHER: "more is better", Better.LOWER: "less is better"}[outcome.better]
    sides = (("base", outcome.base, outcome.base_figures), ("head", outcome.head, outcome.head_figures))
    interval = f"[{outcome.ratio_ci[0]:.4g}, {outcome.ratio_ci[1]:.4g}]" if outcome.ratio_ci else UNKNOWN
    grid = Grid(
        "",
        columns("", "state", f"{outcome.metric}, median ({better}):"),
        tuple((name, label, short(statistics.median(figures))) for name, label, figures in sides),
        (
            f"Ratio head / base: **{outcome.ratio:.4g}**, interval {interval}, by {len(outcome.base_figures)} pairs "
            f"of runs in {duration(outcome.seconds)} of at most {duration(60 * outcome.minutes)}.",
            _findable(outcome),
        ),
    )
    change = f"{outcome.metric} {abs(outcome.loss):.1%} {'worse' if outcome.loss > 0 else 'better'}"
    limit = f"the limit is {100 * outcome.worse_than:.4g}% worse"
    title = f"{outcome.verdict}. {change}, interval of the loss {_shown(outcome.loss_ci)}; {limit}."
    return f"### Gate: {title}\n\n{markdown(grid)}\nRepeat it:\n\n```\n{outcome.repeat}\n```\n"


def _findable(outcome: GateOutcome) -> str:
    if outcome.smallest_loss_found is not None:
        return (
            "The smallest loss that this run, in the whole of its time, would have found four times of five: "
            f"**{outcome.smallest_loss_found:.1%}**."
            + (" Raise --minutes to decide." if outcome.verdict is GateVerdict.CANNOT_SAY else "")
        )
    pairs = len(outcome.base_figures)
    minutes = math.ceil(outcome.minutes * (FEWEST_PAIRS + 1) / pairs)
    return (
        f"{pairs} pairs of runs fitted into the time, and finding a loss needs at least {FEWEST_PAIRS}: "
        f"make the command shorter, or give --minutes {minutes}."
    )


def _shown(interval: tuple[float, float] | None) -> str:
    return f"[{interval[0]:.1%}, {interval[1]:.1%}]" if interval else UNKNOWN


def found_text(found: Found) -> str:
    """Where a search ended."""
    by = f"{found.outcome.loss:.1%} {_shown(found.outcome.loss_ci)}"
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
        f"Not decided {after}, the last with a loss of {by}. The first bad commit is one of these:\n{names}"
    )
