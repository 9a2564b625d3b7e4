"""What the runs of a load come to over all processes: samples of each query, and the facts of the result."""

from collections.abc import Sequence

from optigpu.conductor.verdicts.cost import Evidence
from optigpu.documents.facts import RunFacts
from optigpu.documents.load import QUERY_METRICS, LoadRun
from optigpu.documents.result import Measurement, Samples

MOMENTS = ("sent_s", "prompt_tokens", "output_tokens")
"""Stored beside the samples of the metrics, so that a result can be computed again from each query."""


def load_measurements(evidence: Sequence[Evidence]) -> list[Measurement]:
    """The metrics of queries, and those of runs that may be zero, from the rounds that are counted."""
    runs = [each.selection.of(each.replicate.loads) for each in evidence]
    if not any(runs):
        return []
    return [
        *(Measurement(name=name, samples=_of_queries(name, runs)) for name in QUERY_METRICS),
        Measurement(name="goodput_per_s", samples=_of_runs(runs, "goodput_per_s")),
        Measurement(name="queue_length", samples=_of_runs(runs, "waiting")),
    ]


def raw_queries(evidence: Sequence[Evidence]) -> dict[str, Samples]:
    """Each query's moment and lengths, in the order of the samples of its metrics."""
    runs = [each.selection.of(each.replicate.loads) for each in evidence]
    return {name: _of_queries(name, runs) for name in MOMENTS} if any(runs) else {}


def with_load(facts: RunFacts, evidence: Sequence[Evidence]) -> RunFacts:
    """The facts with what the measured runs say; unchanged where there is no load."""
    runs = [run for each in evidence for run in each.replicate.loads]
    if facts.load is None or not runs:
        return facts
    saturated = [run.saturated for run in runs if run.saturated is not None]
    load = facts.load.model_copy(
        update={
            "runs": len(runs),
            "saturated_runs": sum(saturated) if saturated else None,
            "law": max(
                (run.law for run in runs), key=lambda law: abs(law.counted - law.expected) - law.tolerance
            ),
            "queue": runs[-1].queue,
        }
    )
    return facts.model_copy(update={"load": load})


def _of_queries(name: str, runs: Sequence[Sequence[LoadRun]]) -> Samples:
    return tuple(tuple(float(value) for run in process for value in getattr(run, name)) for process in runs)


def _of_runs(runs: Sequence[Sequence[LoadRun]], name: str) -> Samples:
    return tuple(tuple(float(getattr(run, name)) for run in process) for process in runs)
