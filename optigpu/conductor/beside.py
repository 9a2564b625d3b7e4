"""How many times the figures of variants side by side a variant's are, from the turns of their processes."""

from collections.abc import Mapping, Sequence

from optigpu.conductor.verdicts.cost import Evidence
from optigpu.documents.result import MetricSummary
from optigpu.statistics.within import Timed, ratio_of_turns


def with_turns(
    metrics: Mapping[str, MetricSummary],
    evidence: Sequence[Evidence],
    others: Mapping[int, Sequence[Evidence]],
) -> dict[str, MetricSummary]:
    """The summaries, those of requests with their ratios to what each of the others measured beside it.

    A ratio is left out unless every pair of processes has one.
    """
    of_requests = evidence[0].replicate.samples
    return {
        name: summary.model_copy(update={"beside": _beside(name, evidence, others)})
        if name in of_requests
        else summary
        for name, summary in metrics.items()
    }


def _beside(
    name: str, evidence: Sequence[Evidence], others: Mapping[int, Sequence[Evidence]]
) -> dict[int, tuple[float, ...]]:
    found = {index: _ratios(name, evidence, theirs) for index, theirs in others.items()}
    return {index: ratios for index, ratios in found.items() if ratios}


def _ratios(name: str, evidence: Sequence[Evidence], theirs: Sequence[Evidence]) -> tuple[float, ...]:
    """One for each pair of processes; empty where not every pair has one, or the others measure something else."""
    if any(name not in each.replicate.samples for each in theirs):
        return ()
    pairs = zip(evidence, theirs, strict=False)
    ratios = [ratio_of_turns(*(_timed(name, each) for each in pair)) for pair in pairs]
    found = tuple(ratio for ratio in ratios if ratio is not None)
    return found if len(found) == len(ratios) else ()


def _timed(name: str, evidence: Evidence) -> Timed:
    return Timed(evidence.selection.records, evidence.replicate.samples[name])
