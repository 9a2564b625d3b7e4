"""The table of the largest batches that fit under a limit of memory."""

from optigpu.job.spec import LARGEST_BATCH
from optigpu.measure import Report
from optigpu.report.formats import Column, Grid


def batch_grid(report: Report) -> Grid:
    """One row for each variant: its largest batch, how many times the baseline's that is, or why it has none."""
    limits, results = report.spec.limits, {result.variant.index: result for result in report.results}
    batches = {index: int(result.metrics[LARGEST_BATCH].value or 0) for index, result in results.items()}
    plain = batches.get(0)
    rows = []
    for row in report.attribution.rows:
        found, tried = batches.get(row.index), 0
        if found is not None:
            noted = results[row.index].facts.recorded.get("batches_tried")
            tried = len(noted) if isinstance(noted, list) else 0
        times = f"{found / plain:.2f}" if found and plain else ""
        rows.append((row.label, str(found or ""), times, str(tried or ""), row.reason or ""))
    most = f"{limits.max_batch} is the most that was tried."
    return Grid(
        title=f"Largest batch under {(limits.max_bytes or 0) / 1e9:.3g} GB",
        columns=(
            Column("stack"),
            Column("largest batch", right=True),
            Column("times as many", right=True),
            Column("attempts", right=True),
            Column("why"),
        ),
        rows=tuple(rows),
        notes=(most,) if limits.max_batch in batches.values() else (),
    ).without_empty_columns()
