"""The ladder as a waterfall: what each rung adds to the speedup of the rungs before it."""

from collections.abc import Iterator, Sequence

from optigpu.documents.result import AttributionRow
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report
from optigpu.report.charts.metrics import rungs_of
from optigpu.report.numbers import ratio
from optigpu.report.origin import origin_line
from optigpu.vocabulary import Role, SpecError


def waterfall_data(report: Report) -> ChartData:
    """From the attribution of one job. Raises SpecError where no rung of a ladder has a speedup."""
    rows = report.attribution.rows if report.attribution else ()
    sources = {each["variant"]["index"]: str(each["id"]) for each in rungs_of(report)}
    rungs = [row for row in rows if row.role is not Role.BASELINE and row.index in sources]
    marks = tuple(_marks(rungs, sources))
    if not marks:
        raise SpecError(
            "No report is of one ladder whose rungs were measured; run `optigpu ladder --model preset:gpt2 "
            "--stack int8_weight_only,static_kv_cache`."
        )
    start = Mark(label="baseline", value=1.0, series="baseline", text="1")
    return ChartData(
        title=report.title,
        panels=(
            Panel(
                title="What each technique adds to the rung before it",
                form=Form.BARS,
                axis="times the baseline",
                marks=(start, *marks),
                missing={
                    row.label: row.reason or "no speedup"
                    for row in rows
                    if row.role is Role.CUMULATIVE
                    and row.index not in {rung.index for rung in rungs if rung.speedup}
                },
            ),
        ),
        note="A bar reaches from the rung before it to this one; its line is the 95% interval of this rung's speedup. "
        "Beside it stands what the rung adds. Striped: not valid.",
        origin=origin_line(report.results),
    )


def _marks(rungs: Sequence[AttributionRow], sources: dict[int, str]) -> Iterator[Mark]:
    """Each rung that has a speedup, from the one before it that has one."""
    before = 1.0
    for row in rungs:
        if row.speedup is None:
            continue
        added = f"added {ratio(row.added)}" if row.added else ""
        yield Mark(
            label=f"+ {row.technique}" if row.technique else row.label,
            value=row.speedup.ratio,
            ci=row.speedup.ci,
            start=before,
            series="gain" if row.speedup.ratio >= before else "loss",
            text=" ".join(filter(None, [ratio(row.speedup), f"({added})" if added else ""])),
            valid=row.speedup.valid,
            source=sources.get(row.index),
        )
        before = row.speedup.ratio
