"""A ladder: what each technique bought, added to those before it, alone and left out; and its rungs in four panels."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pydantic import Field

from optigpu.documents.result import AttributionRow, Gain
from optigpu.report.charts.marks import (
    GOAL_PERCENT,
    LOSSES,
    ChartData,
    Form,
    Mark,
    Panel,
    Report,
    bar_of,
    figure_of,
    first_measured,
    is_valid,
    label_of,
    loss_of,
    primary_of,
    reason_of,
    rungs_of,
)
from optigpu.report.numbers import ratio, short
from optigpu.report.origin import origin_line
from optigpu.vocabulary import METRICS, Better, Document, Frozen, Role, SpecError


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


MEMORIES = ("peak_bytes", "weight_bytes")


@dataclass(frozen=True)
class Speedup:
    """Of a variant relative to the baseline; `gain` has its interval, and is None where no attribution says it."""

    result: Document
    ratio: float
    gain: Gain | None


def overview_data(report: Report) -> ChartData:
    """The baseline and each prefix of the stack. Raises SpecError without a baseline that was measured."""
    rungs = rungs_of(report)
    baseline = rungs[0] if rungs else None
    if baseline is None or primary_of(baseline)["value"] is None:
        raise SpecError(
            "No result is a baseline that the others can be compared with; run `optigpu ladder --model bundled:tiny "
            "--stack int8_weight_only,static_kv_cache`."
        )
    speedups = list(_speedups(rungs, baseline, report))
    return ChartData(
        title=report.title,
        panels=(
            _speedup_panel(speedups, rungs),
            _memory_panel(rungs, baseline),
            _utilization_panel(rungs),
            _loss_panel(speedups),
        ),
        note="Lines: 95% intervals. Dashed or hollow: not valid. "
        f"Dashed line: {GOAL_PERCENT:g}% lost, the founding goal.",
        origin=origin_line(rungs),
    )


def _speedups(rungs: Sequence[Document], baseline: Document, report: Report) -> Iterator[Speedup]:
    """By the attribution, which compares turn by turn; else by the two figures, without an interval."""
    rows = report.attribution.rows if report.attribution else ()
    gains = {row.index: row.speedup for row in rows}
    name = baseline["variant"]["primary_metric"]
    for result in rungs:
        own = figure_of(result, name)
        if own is None:
            continue
        plain = own["value"] / primary_of(baseline)["value"]
        better = plain if METRICS[name].better is Better.HIGHER else 1 / plain
        gain = gains.get(result["variant"]["index"])
        yield Speedup(result, gain.ratio if gain else better, gain)


def _speedup_panel(speedups: Sequence[Speedup], rungs: Sequence[Document]) -> Panel:
    shown = [each.result for each in speedups]
    name = rungs[0]["variant"]["primary_metric"]
    return Panel(
        title="Cumulative speedup",
        form=Form.BARS,
        axis="times the baseline",
        marks=tuple(
            Mark(
                label=label_of(each.result),
                value=each.ratio,
                ci=each.gain.ci if each.gain else None,
                text=ratio(each.gain) if each.gain else f"{each.ratio:.2f}x",
                valid=is_valid(each.result),
                source=str(each.result["id"]),
            )
            for each in speedups
        ),
        missing={label_of(each): reason_of(each, name) for each in rungs if each not in shown},
    )


def _memory_panel(rungs: Sequence[Document], baseline: Document) -> Panel:
    """The accelerator's peak where it is known, else the bytes of the weights, in percent of the baseline's."""
    name = first_measured([baseline], MEMORIES) or MEMORIES[-1]
    whole = figure_of(baseline, name)
    found = [(each, figure_of(each, name)) for each in rungs]
    return Panel(
        title="Memory",
        form=Form.BARS,
        axis=f"{'peak memory' if name == 'peak_bytes' else 'bytes of the weights'} (% of the baseline)",
        marks=tuple(
            bar_of(each, metric, 100 / whole["value"], str(each["variant"]["label"]))
            for each, metric in found
            if metric and whole
        ),
        missing={label_of(each): reason_of(each, name) for each, metric in found if not metric},
    )


def _utilization_panel(rungs: Sequence[Document]) -> Panel:
    """Shares of the measured memory bandwidth and of the measured rate of matrix products."""
    names = ("mbu", "mfu")
    marks = [
        bar_of(each, metric, 100.0, str(each["variant"]["label"]), series=name)
        for each in rungs
        for name in names
        if (metric := figure_of(each, name))
    ]
    return Panel(
        title="Utilization",
        form=Form.BARS,
        axis="share of what this machine was measured to do (%)",
        marks=tuple(marks),
        missing={label_of(each): reason_of(each, "mbu") for each in rungs if not figure_of(each, "mbu")},
    )


def _loss_panel(speedups: Sequence[Speedup]) -> Panel:
    name = first_measured([each.result for each in speedups], tuple(LOSSES))
    found = [(each, loss_of(each.result, name) if name else None) for each in speedups]
    return Panel(
        title="Speedup over the loss of quality",
        form=Form.LOSS,
        axis="times the baseline",
        x_axis=LOSSES[name] if name else "",
        marks=tuple(
            Mark(
                label=label_of(each.result),
                series=label_of(each.result),
                value=each.ratio,
                ci=each.gain.ci if each.gain else None,
                x=loss[0],
                x_ci=loss[1],
                text=f"{short(loss[0])}%",
                valid=is_valid(each.result),
                source=str(each.result["id"]),
            )
            for each, loss in found
            if loss
        ),
        missing={
            label_of(each.result): reason_of(each.result, name or "top1_agreement")
            for each, loss in found
            if not loss
        },
    )


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
        "Beside it stands what the rung adds. Dashed: not valid.",
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
