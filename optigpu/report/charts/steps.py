"""What each technique of a ladder bought: added to those before it, alone, and what the whole loses without it."""

from collections.abc import Iterator, Sequence

from pydantic import Field

from optigpu.documents.result import AttributionRow, Gain
from optigpu.report.charts.marks import Report
from optigpu.report.charts.metrics import rungs_of
from optigpu.vocabulary import Frozen, Role, SpecError


class Step(Frozen):
    """One rung: the speedup relative to the baseline, `before` it and with it. What was not measured is null."""

    label: str
    before: float
    speedup: Gain
    added: Gain | None = None
    alone: Gain | None = None
    left_out: Gain | None = None
    source: str | None = None


class Steps(Frozen):
    """A ladder from its baseline up. `missing` says which rungs have no speedup, each with its reason."""

    title: str
    metric: str
    steps: tuple[Step, ...]
    missing: dict[str, str] = Field(default_factory=dict)


def steps_data(report: Report) -> Steps:
    """From the attribution of one job. Raises SpecError where no rung of a ladder has a speedup."""
    rows = report.attribution.rows if report.attribution else ()
    sources = {each["variant"]["index"]: str(each["id"]) for each in rungs_of(report)}
    rungs = [row for row in rows if row.role is not Role.BASELINE and row.index in sources]
    steps = tuple(_steps(rungs, rows, sources))
    if report.attribution is None or not steps:
        raise SpecError(
            "No report is of one ladder whose rungs were measured; run `optigpu ladder --model preset:gpt2 "
            "--stack int8_weight_only,static_kv_cache`."
        )
    measured = {rung.index for rung in rungs if rung.speedup}
    return Steps(
        title=report.title,
        metric=report.attribution.metric,
        steps=steps,
        missing={
            row.label: row.reason or "no speedup"
            for row in rows
            if row.role is Role.CUMULATIVE and row.index not in measured
        },
    )


def _steps(
    rungs: Sequence[AttributionRow], rows: Sequence[AttributionRow], sources: dict[int, str]
) -> Iterator[Step]:
    """Each rung that has a speedup, from the one before it that has one."""
    alone = {row.technique: row for row in rows if row.role is Role.ALONE and row.technique}
    before = 1.0
    for row in rungs:
        if row.speedup is None:
            continue
        own = alone.get(row.technique) if row.technique else None
        yield Step(
            label=f"+ {row.technique}" if row.technique else row.label,
            before=before,
            speedup=row.speedup,
            added=row.added,
            alone=own.alone if own else None,
            left_out=own.left_out if own else None,
            source=sources.get(row.index),
        )
        before = row.speedup.ratio
