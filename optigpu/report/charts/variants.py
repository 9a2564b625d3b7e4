"""A figure of each variant: alone, below the roofs, over the loss of quality, over latency; and of each precision."""

from collections.abc import Iterator, Sequence
from typing import get_args

from optigpu.claims.matching import PRECISION_ALONE, has_precision
from optigpu.claims.model import Precision
from optigpu.documents.older import facts_of
from optigpu.report.charts.marks import (
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
from optigpu.report.numbers import short, with_interval
from optigpu.report.rows import heading
from optigpu.vocabulary import Better, Document, SpecError


def ladder_data(report: Report) -> ChartData:
    """The primary metric of each variant, in the order of the plan. Raises SpecError where none has a value."""
    marks = tuple(
        bar_of(each, primary_of(each), series=str(each["variant"]["role"])) for each in report.measured
    )
    if not marks:
        raise SpecError("No result has a value to draw; `optigpu run --format json` prints the reasons.")
    return _one(report, Panel(title="ladder", form=Form.BARS, axis=_axis(report), marks=marks))


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
    return _one(report, panel)


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
        marks=tuple(_point(each, loss) for each in timed if (loss := loss_of(each, name))),
        missing=missing_of(timed, name),
    )
    return _one(report, panel)


def throughput_data(report: Report) -> ChartData:
    """The primary metric over the median latency of a request. Raises SpecError where none has both."""
    marks = tuple(
        _point(each, estimate(latency, 1e3))
        for each in report.measured
        if (latency := figure_of(each, "latency_s"))
    )
    if not marks:
        raise SpecError(
            "No result has a latency to draw; measure a workload that has one, such as batch_sweep."
        )
    panel = Panel(
        title="throughput",
        form=Form.LINES,
        axis=_axis(report),
        x_axis="latency of a request (ms)",
        marks=marks,
        missing=missing_of(report.results, "latency_s"),
    )
    return _one(report, panel)


def _point(result: Document, x: Estimate) -> Mark:
    primary = primary_of(result)
    return mark_of(result, estimate(primary), x, series=label_of(result), text=with_interval(primary))


def _axis(report: Report) -> str:
    return heading(report.results[0]["variant"]["primary_metric"])


def _one(report: Report, panel: Panel) -> ChartData:
    return of_panels(report, report.results, panel)


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
