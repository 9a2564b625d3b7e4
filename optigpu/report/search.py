"""The table of what a search ends with: the stacks that no other surpasses."""

from optigpu.documents.result import Result
from optigpu.job.search import is_allowed, left_out, pareto
from optigpu.measure import Report
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import NOT_VALID, scaled, with_interval
from optigpu.report.rows import heading


def pareto_grid(report: Report) -> Grid:
    """The Pareto set over speed, bytes, quality and energy, the fastest first; figures of short rounds say so."""
    primary = report.spec.workload.primary
    allowed = [result for result in report.results if is_allowed(report.spec, result)]
    found = sorted(
        pareto(allowed, primary), key=lambda result: result.metrics[primary].value or 0.0, reverse=True
    )
    missed = left_out(report.spec)
    notes = ["No other stack is as good in each of speed, bytes, quality and energy, and better in one."]
    if missed:
        notes.append(f"{missed} more stacks of the menu were not tried; raise limits.max_variants.")
    return Grid(
        title=f"Pareto set of {len(report.outcomes)} stacks",
        columns=(
            Column("stack"),
            Column(heading(primary), right=True),
            Column("weights (MB)", right=True),
            Column("kld_mean (nat)", right=True),
            Column("J/token", right=True),
            Column("measured in round", right=True),
        ),
        rows=tuple(_row(result, primary) for result in found),
        notes=tuple(notes),
    ).without_empty_columns()


def _row(result: Result, primary: str) -> tuple[str, ...]:
    metrics = {name: summary.model_dump(mode="json") for name, summary in result.metrics.items()}
    recorded = result.facts.recorded
    return (
        result.variant.label + ("" if result.verdict.valid else NOT_VALID),
        with_interval(metrics.get(primary)),
        scaled(metrics.get("weight_bytes"), 1e-6),
        with_interval(metrics.get("kld_mean")),
        with_interval(metrics.get("j_per_token")),
        f"{recorded.get('search_round', 1)} of {recorded.get('search_rounds', 1)}",
    )
