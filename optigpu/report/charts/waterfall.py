"""The ladder as a waterfall: what each rung adds to the speedup of the rungs before it."""

from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report
from optigpu.report.charts.steps import Step, steps_data
from optigpu.report.numbers import ratio
from optigpu.report.origin import origin_line


def waterfall_data(report: Report) -> ChartData:
    """From the attribution of one job. Raises SpecError where no rung of a ladder has a speedup."""
    found = steps_data(report)
    start = Mark(label="baseline", value=1.0, series="baseline", text="1")
    return ChartData(
        title=report.title,
        panels=(
            Panel(
                title="What each technique adds to the rung before it",
                form=Form.BARS,
                axis="times the baseline",
                marks=(start, *map(_mark, found.steps)),
                missing=found.missing,
            ),
        ),
        note="A bar reaches from the rung before it to this one; its line is the 95% interval of this rung's speedup. "
        "Beside it stands what the rung adds. Striped: not valid.",
        origin=origin_line(report.results),
    )


def _mark(step: Step) -> Mark:
    added = f"(added {ratio(step.added)})" if step.added else ""
    return Mark(
        label=step.label,
        value=step.speedup.ratio,
        ci=step.speedup.ci,
        start=step.before,
        series="gain" if step.speedup.ratio >= step.before else "loss",
        text=" ".join(filter(None, [ratio(step.speedup), added])),
        valid=step.speedup.valid,
        source=step.source,
    )
