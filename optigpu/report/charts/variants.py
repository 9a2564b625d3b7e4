"""A figure of each variant: alone, below the roofs, over the loss of quality, beside claims for an RTX 5090; of
each precision; and of a ladder: what each technique bought, added to those before it, and its rungs in four panels."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from optigpu.claims.matching import PRECISION_ALONE, Measured, beside, from_results, has_precision
from optigpu.claims.model import UNITS, Book, Claim, Precision, baselines
from optigpu.documents.result import Gain
from optigpu.documents.versions import facts_of
from optigpu.report.charts.marks import (
    GOAL_PERCENT,
    LOSSES,
    ChartData,
    Estimate,
    Form,
    Mark,
    Panel,
    Report,
    Roof,
    bar_of,
    estimate,
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
from optigpu.report.formats import ratio, short, with_interval
from optigpu.report.rows import heading
from optigpu.vocabulary import METRICS, Better, Document, Role, SpecError


def ladder_data(report: Report) -> ChartData:
    """The primary metric of each variant, in the order of the plan. Raises SpecError where none has a value."""
    marks = tuple(
        bar_of(each, primary_of(each), series=str(each["variant"]["role"])) for each in report.measured
    )
    if not marks:
        raise SpecError("No result has a value to draw; `optigpu run --format json` prints the reasons.")
    return of_panels(
        report, report.results, Panel(title="ladder", form=Form.BARS, axis=_axis(report), marks=marks)
    )


def roofline_data(report: Report) -> ChartData:
    """GFLOP/s over FLOP/byte of each variant's step, with the roofs; `text` says what bounds it. Raises SpecError where
    no result has a roofline."""
    steps = [(each, (facts_of(each).get("roofline") or {}).get("step")) for each in report.results]
    found = [(each, step) for each, step in steps if step and step["measured_s"] and step["flops"]]
    if not found:
        raise SpecError(
            "No result has a roofline to draw; facts.roofline.reason in the results says why there is none."
        )
    panel = Panel(
        title="roofline",
        form=Form.ROOFLINE,
        axis="operations (GFLOP/s)",
        x_axis="arithmetic intensity of a step (FLOP/byte)",
        x_better=Better.HIGHER,
        logarithmic=True,
        marks=tuple(_under_roof(each, step) for each, step in found),
        roofs=tuple(_roofs(found)),
    )
    return of_panels(report, report.results, panel)


def _under_roof(result: Document, step: Document) -> Mark:
    primary, value = primary_of(result), step["flops"] / step["measured_s"] / 1e9
    ci = estimate(primary, value / primary["value"])[1] if primary["value"] else None
    limit = step["flops"] / step["attainable_s"] / 1e9
    share = step["attainable_s"] / step["measured_s"]
    text = f"{share:.0%} of its roof of {short(limit)} GFLOP/s; bound: {step['bound']}"
    return mark_of(result, (value, ci), (step["flops_per_byte"], None), text=text, limit=limit)


def _roofs(found: Sequence[tuple[Document, Document]]) -> Iterator[Roof]:
    """A slope for each bandwidth, the lowest first, and a ceiling for each rate with the dtypes that reach it."""
    bandwidths = {step["roof"]["bytes_per_s"]: step["roof"]["array_bytes"] for _, step in found}
    for bandwidth, size in sorted(bandwidths.items()):
        array = f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
        yield Roof(text=f"{short(bandwidth / 1e9)} GB/s reading {array}", gb_per_s=bandwidth / 1e9)
    rates: dict[float, set[str]] = {}
    for result, step in found:
        rates.setdefault(step["roof"]["flops_per_s"], set()).add(facts_of(result)["roofline"]["dtype"])
    for rate, dtypes in rates.items():
        text = f"{', '.join(sorted(dtypes))}: {short(rate / 1e9)} GFLOP/s"
        yield Roof(text=text, gflop_per_s=rate / 1e9)


def quality_data(report: Report) -> ChartData:
    """The primary metric over the loss of quality: of accuracy where it was measured, else the share of positions whose
    most likely token is another one than fp32's. Raises SpecError where no result has both."""
    timed = report.measured
    name = first_measured(timed, LOSSES)
    if name is None:
        raise SpecError(
            "No result has a quality to draw; measure a trained model, such as bundled:tiny, with the meter 'quality'."
        )
    panel = Panel(
        title="quality",
        form=Form.LOSS,
        axis=_axis(report),
        x_axis=LOSSES[name],
        marks=tuple(
            mark_of(each, estimate(primary), loss, series=label_of(each), text=with_interval(primary))
            for each in timed
            if (primary := primary_of(each)) and (loss := loss_of(each, name))
        ),
        missing=missing_of(timed, name),
    )
    return of_panels(report, report.results, panel)


def _axis(report: Report) -> str:
    return heading(report.results[0]["variant"]["primary_metric"])


LATENCIES = ("latency_s", "step_s")
MEMORIES = ("peak_bytes", "weight_bytes", "host_peak_bytes")
"""The preferred metric first: the accelerator's peak is known on a GPU alone."""
OF_PRECISION = PRECISION_ALONE | {"native_decode", "mixed_precision"}
"""Techniques by which a variant is one of a precision, if it has no others."""


def precision_data(report: Report) -> ChartData:
    """Variants that differ in their precision alone. Raises SpecError where none has a latency or a memory."""
    stacks = [({each["name"] for each in result["variant"]["stack"]}, result) for result in report.results]
    shown = [result for names, result in stacks if names <= OF_PRECISION]
    latency, memory = first_measured(shown, LATENCIES), first_measured(shown, MEMORIES)
    if latency is None and memory is None:
        raise SpecError(
            "No result has a latency or a memory of a precision; run `optigpu ladder --model preset:gpt2 "
            "--stack bf16` or another technique of the layer quantization."
        )
    return of_panels(
        report,
        shown,
        _precision_panel("Latency", shown, latency or LATENCIES[0], 1e3, "ms"),
        _precision_panel("Memory", shown, memory or MEMORIES[0], 1e-6, "MB"),
        note="Lines: 95% intervals. Dashed: not valid. Less is better.",
    )


def _precision_panel(title: str, results: Sequence[Document], name: str, scale: float, unit: str) -> Panel:
    """A bar for each result that has the metric; the others are named with the reason."""
    found = [(each, precision_label(each), figure_of(each, name)) for each in results]
    return Panel(
        title=title,
        form=Form.BARS,
        axis=f"{name.removesuffix('_s').removesuffix('_bytes').replace('_', ' ')} ({unit})",
        marks=tuple(bar_of(each, metric, scale, label) for each, label, metric in found if metric),
        missing={label: reason_of(each, name) for each, label, metric in found if not metric},
    )


def precision_label(result: Document) -> str:
    """A variant's label after its precision, where the stack says one: "int8: int8_weight_only"."""
    variant = result["variant"]
    if not variant["model"]:
        return str(variant["label"])
    known = [each for each in get_args(Precision) if has_precision(each, tuple(variant["stack"]))]
    named = not known or str(variant["label"]).startswith(known[0])
    return str(variant["label"]) if named else f"{known[0]}: {variant['label']}"


OF_RUNGS = ("peak_bytes", "weight_bytes")
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
    name = first_measured(rungs[:1], OF_RUNGS) or OF_RUNGS[-1]
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


CARD = "NVIDIA GeForce RTX 5090"


def baselines_data(report: Report) -> ChartData:
    """Raises SpecError where no valid result is of the work of one of the baselines."""
    measured = from_results(report.results)
    found = [(claim, figures) for claim in claims(baselines()) if (figures := beside(claim, measured))]
    if not found:
        raise SpecError(
            f"No valid result is of the work that is claimed for an {CARD}; run `optigpu run --workload matmul "
            "--sizes 4096`, or `optigpu ladder --model preset:gpt2 --stack int8_weight_only`."
        )
    ids = {figure.result_id for _, figures in found for figure in figures}
    return of_panels(
        replace(report, title=f"Beside what is claimed for an {CARD}: {report.title}"),
        [each for each in report.results if each["id"] in ids],
        *(_panel(claim, figures) for claim, figures in found),
        note=f"Pale and dotted: a claim, which OptiGPU has not measured ({found[0][0].source}). "
        "All others were measured; lines are 95% intervals.",
    )


def claims(book: Book) -> list[Claim]:
    """The published speeds of the card."""
    speeds = ("tflops", "tokens_per_s", "latency_s")
    return [each for each in book.claims if each.hardware == CARD and each.metric in speeds]


def _panel(claim: Claim, figures: Sequence[Measured]) -> Panel:
    """In the claim's unit."""
    scale = UNITS[claim.unit]
    better = "less" if METRICS[claim.metric].better is Better.LOWER else "more"
    published = Mark(
        label=f"{claim.what}, {claim.precision} (claim)",
        value=claim.value,
        text=f"{short(claim.value)}, claimed",
        claimed=True,
        source=claim.id,
    )
    measured = (
        Mark(
            label=figure.label,
            value=figure.value / scale,
            ci=(figure.ci[0] / scale, figure.ci[1] / scale) if figure.ci else None,
            text=short(figure.value / scale),
            source=figure.result_id,
        )
        for figure in figures
    )
    return Panel(
        title=claim.what.removesuffix(", naive"),
        form=Form.BARS,
        axis=f"{claim.unit} ({better} is better)",
        marks=(published, *measured),
    )
