"""A ladder: what each technique bought, added to those before it; and its rungs in four panels."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from optigpu.documents.result import Gain
from optigpu.report.charts.marks import (
    GOAL_PERCENT,
    LOSSES,
    ChartData,
    Estimate,
    Form,
    Mark,
    Panel,
    Report,
    bar_of,
    figure_of,
    first_measured,
    label_of,
    loss_of,
    mark_of,
    missing_of,
    of_panels,
    primary_of,
    reason_of,
)
from optigpu.report.numbers import ratio, short
from optigpu.vocabulary import METRICS, Better, Document, Role, SpecError

MEMORIES = ("peak_bytes", "weight_bytes")
"""The preferred metric first: the accelerator's peak is known on a GPU alone."""


def rungs_of(report: Report) -> list[Document]:
    """The baseline of a ladder and each prefix of its stack, of the first workload and model that it has a baseline of.

    The first prefix is the first technique alone, which the attribution knows by what it added; without an attribution
    it is taken to be the first that was measured alone. Empty without a baseline.
    """
    first = next((each["variant"] for each in report.results if _role(each) == Role.BASELINE), None)
    if first is None:
        return []
    names = ("workload_digest", "model")
    same = [each for each in report.results if all(each["variant"][name] == first[name] for name in names)]
    alone = [each["variant"]["index"] for each in same if _role(each) == Role.ALONE]
    added = [row.index for row in report.rows if row.added is not None] if report.rows else alone[:1]
    return [
        each
        for each in same
        if _role(each) in (Role.BASELINE, Role.CUMULATIVE)
        or (_role(each) == Role.ALONE and each["variant"]["index"] in added)
    ]


def _role(result: Document) -> str:
    return str(result["variant"]["role"])


class Speedup(NamedTuple):
    """Of a variant relative to the baseline. Without an attribution there is no `gain`, and no interval."""

    result: Document
    estimate: Estimate
    gain: Gain | None


def overview_data(report: Report) -> ChartData:
    """The baseline and each prefix of the stack. Raises SpecError without a baseline that was measured."""
    rungs = rungs_of(report)
    if not rungs or primary_of(rungs[0])["value"] is None:
        raise SpecError(
            "No result is a baseline that the others can be compared with; run `optigpu ladder --model bundled:tiny "
            "--stack int8_weight_only,static_kv_cache`."
        )
    speedups = list(_speedups(rungs, report))
    return of_panels(
        report,
        rungs,
        _speedup_panel(speedups, rungs),
        _memory_panel(rungs),
        _utilization_panel(rungs),
        _loss_panel(speedups),
        note="Lines: 95% intervals. Dashed or hollow: not valid. "
        f"Dashed line: {GOAL_PERCENT:g}% lost, the founding goal.",
    )


def _speedups(rungs: Sequence[Document], report: Report) -> Iterator[Speedup]:
    """By the attribution, which compares turn by turn; else by the two figures, without an interval."""
    gains = {row.index: row.speedup for row in report.rows}
    name = rungs[0]["variant"]["primary_metric"]
    for result in rungs:
        if own := figure_of(result, name):
            gain = gains.get(result["variant"]["index"])
            plain = own["value"] / primary_of(rungs[0])["value"]
            better = plain if METRICS[name].better is Better.HIGHER else 1 / plain
            yield Speedup(result, (gain.ratio, gain.ci) if gain else (better, None), gain)


def _speedup_panel(speedups: Sequence[Speedup], rungs: Sequence[Document]) -> Panel:
    return Panel(
        title="Cumulative speedup",
        form=Form.BARS,
        axis="times the baseline",
        marks=tuple(
            mark_of(result, speedup, text=ratio(gain) if gain else f"{speedup[0]:.2f}x")
            for result, speedup, gain in speedups
        ),
        missing=missing_of(rungs, rungs[0]["variant"]["primary_metric"]),
    )


def _memory_panel(rungs: Sequence[Document]) -> Panel:
    """The accelerator's peak where it is known, else the bytes of the weights, in percent of the baseline's."""
    name = first_measured(rungs[:1], MEMORIES) or MEMORIES[-1]
    whole = figure_of(rungs[0], name)
    return Panel(
        title="Memory",
        form=Form.BARS,
        axis=f"{'peak memory' if name == 'peak_bytes' else 'bytes of the weights'} (% of the baseline)",
        marks=tuple(
            bar_of(each, metric, 100 / whole["value"])
            for each in rungs
            if (metric := figure_of(each, name)) and whole
        ),
        missing=missing_of(rungs, name),
    )


def _utilization_panel(rungs: Sequence[Document]) -> Panel:
    """Shares of the measured memory bandwidth and of the measured rate of matrix products."""
    return Panel(
        title="Utilization",
        form=Form.BARS,
        axis="share of what this machine was measured to do (%)",
        marks=tuple(
            bar_of(each, metric, 100.0, series=name)
            for each in rungs
            for name in ("mbu", "mfu")
            if (metric := figure_of(each, name))
        ),
        missing=missing_of(rungs, "mbu"),
    )


def _loss_panel(speedups: Sequence[Speedup]) -> Panel:
    name = first_measured([each.result for each in speedups], LOSSES)
    found = [(each, loss_of(each.result, name)) for each in speedups]
    return Panel(
        title="Speedup over the loss of quality",
        form=Form.LOSS,
        axis="times the baseline",
        x_axis=LOSSES[name] if name else "",
        marks=tuple(
            mark_of(each.result, each.estimate, loss, series=label_of(each.result), text=f"{short(loss[0])}%")
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
    """From the attribution of one job: a bar from the speedup of each rung that has one to that of the next. Raises
    SpecError where no rung of a ladder has a speedup."""
    marks = tuple(_steps(report))
    if len(marks) == 1:
        raise SpecError(
            "No report is of one ladder whose rungs were measured; run `optigpu ladder --model preset:gpt2 "
            "--stack int8_weight_only,static_kv_cache`."
        )
    known = {each["variant"]["index"] for each in rungs_of(report)}
    panel = Panel(
        title="What each technique adds to the rung before it",
        form=Form.BARS,
        axis="times the baseline",
        marks=marks,
        missing={
            row.label: row.reason or "no speedup"
            for row in report.rows
            if row.role is Role.CUMULATIVE and not (row.speedup and row.index in known)
        },
    )
    return of_panels(
        report,
        report.results,
        panel,
        note="A bar reaches from the rung before it to this one; its line is the 95% interval of this rung's speedup. "
        "Beside it stands what the rung adds. Dashed: not valid.",
    )


def _steps(report: Report) -> Iterator[Mark]:
    yield Mark(label="baseline", value=1.0, series="baseline", text="1")
    sources = {each["variant"]["index"]: str(each["id"]) for each in rungs_of(report)}
    before = 1.0
    for row in report.rows:
        if row.role is not Role.BASELINE and row.index in sources and row.speedup:
            now = row.speedup.ratio
            yield Mark(
                label=f"+ {row.technique}" if row.technique else row.label,
                value=now,
                ci=row.speedup.ci,
                start=before,
                series="gain" if now >= before else "loss",
                text=ratio(row.speedup) + (f" (added {ratio(row.added)})" if row.added else ""),
                valid=row.speedup.valid,
                source=sources[row.index],
            )
            before = now
