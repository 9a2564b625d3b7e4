"""What the runs of a load say of a result: queries that failed, counts that do not fit, a queue without an end."""

from collections.abc import Iterator, Sequence

from optigpu.conductor.verdicts.cost import Evidence
from optigpu.documents.load import LoadRun, grew_in_most


def failed(evidence: Sequence[Evidence]) -> str | None:
    """How many queries were not answered, and why the first was not."""
    runs = [run for run in _runs(evidence) if run.failed]
    if not runs:
        return None
    count, of = sum(run.failed for run in runs), sum(len(run.sent_s) for run in _runs(evidence))
    return f"{count} of {of} requests failed: {runs[0].error}"


def queries(evidence: Sequence[Evidence]) -> int:
    """How many queries figures come from; 0 where requests are no runs of a load."""
    runs = (run for each in evidence for run in each.selection.of(each.replicate.loads))
    return sum(len(run.sent_s) for run in runs)


def unlawful(evidence: Sequence[Evidence]) -> str | None:
    """The run whose counts contradict each other."""
    wrong = next((run.law for run in _runs(evidence) if not run.law.holds), None)
    if wrong is None:
        return None
    return (
        f"Little's law does not hold: {wrong.counted:.4g} requests were counted under way on average, and by their "
        f"rate of {wrong.rate:.4g}/s and their time in the server of {wrong.latency_s - wrong.late_s:.4g} s there were "
        f"{wrong.expected:.4g}, which is further off than {wrong.tolerance:.2g}; some were lost or counted twice, or a "
        "clock jumped."
    )


def saturated(evidence: Sequence[Evidence]) -> str | None:
    """That the queue grew without an end in most runs, by those of the rounds that nothing disturbed."""
    growth = _growth(_undisturbed(evidence))
    return growth and (
        f"{growth}: requests come faster than they are served, and latencies depend on how long a run lasts; ask for a "
        "lower rate."
    )


def undecided(evidence: Sequence[Evidence]) -> str | None:
    """That the queue grew in most runs, and that every round was disturbed, so that it may have grown for that."""
    growth = None if _undisturbed(evidence) else _growth(list(_runs(evidence)))
    return growth and (
        f"{growth}, and every round was disturbed, which lets a queue grow too: whether requests come faster than they "
        "are served is undecided; measure again while the machine rests."
    )


def _growth(runs: Sequence[LoadRun]) -> str | None:
    if not grew_in_most(runs):
        return None
    known = sum(run.saturated is not None for run in runs)
    grown = sorted(run.growth or 0.0 for run in runs if run.saturated)
    return (
        f"The queue grew in {len(grown)} of {known} runs, by {grown[len(grown) // 2]:.2g} requests a second"
    )


def _undisturbed(evidence: Sequence[Evidence]) -> list[LoadRun]:
    return [run for each in evidence for run in each.selection.unmarked(each.replicate.loads)]


def _runs(evidence: Sequence[Evidence]) -> Iterator[LoadRun]:
    return (run for each in evidence for run in each.replicate.loads)
