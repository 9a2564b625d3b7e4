"""A figure of each variant: alone, below the roofs, over the loss of quality, over latency; and of each precision."""

from collections.abc import Iterator, Sequence
from typing import get_args

from optigpu.claims.matching import PRECISION_ALONE, has_precision
from optigpu.claims.model import Precision
from optigpu.documents.older import facts_of
from optigpu.report.charts.marks import (
    LOSSES,
    ChartData,
    Form,
    Mark,
    Panel,
    Report,
    Roof,
    bar_of,
    figure_of,
    first_measured,
    interval_of,
    is_valid,
    label_of,
    loss_of,
    metric_panel,
    primary_of,
    reason_of,
)
from optigpu.report.numbers import short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Better, Document, SpecError


def ladder_data(report: Report) -> ChartData:
    """The primary metric of each variant, in the order of the plan. Raises SpecError where none has a value."""
    marks = tuple(
        bar_of(each, primary_of(each), 1.0, str(each["variant"]["label"]), str(each["variant"]["role"]))
        for each in report.results
        if primary_of(each)["value"] is not None
    )
    if not marks:
        raise SpecError("No result has a value to draw; `optigpu run --format json` prints the reasons.")
    return _one(report, Panel(title="ladder", form=Form.BARS, axis=_axis(report), marks=marks))


def roofline_data(report: Report) -> ChartData:
    """GFLOP/s over FLOP/byte of each variant's step, with the roofs; `text` says what bounds it.

    Raises SpecError where no result has a roofline.
    """
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
    limit = step["flops"] / step["attainable_s"] / 1e9
    share = step["attainable_s"] / step["measured_s"]
    return Mark(
        label=label_of(result),
        x=step["flops_per_byte"],
        value=value,
        ci=interval_of(primary, value / primary["value"]) if primary["value"] else None,
        limit=limit,
        text=f"{share:.0%} of its roof of {short(limit)} GFLOP/s; bound: {step['bound']}",
        valid=is_valid(result),
        source=str(result["id"]),
    )


def _roofs(found: Sequence[tuple[Document, Document]]) -> Iterator[Roof]:
    """A slope for each bandwidth, the lowest first, and a ceiling for each rate with the dtypes that reach it."""
    roofs = [step["roof"] for _, step in found]
    for bandwidth, array_bytes in sorted(
        {roof["bytes_per_s"]: roof["array_bytes"] for roof in roofs}.items()
    ):
        text = f"{short(bandwidth / 1e9)} GB/s reading {array_size(array_bytes)}"
        yield Roof(text=text, gb_per_s=bandwidth / 1e9)
    rates: dict[float, set[str]] = {}
    for (result, _), roof in zip(found, roofs, strict=True):
        rates.setdefault(roof["flops_per_s"], set()).add(facts_of(result)["roofline"]["dtype"])
    for rate, dtypes in rates.items():
        text = f"{', '.join(sorted(dtypes))}: {short(rate / 1e9)} GFLOP/s"
        yield Roof(text=text, gflop_per_s=rate / 1e9)


def array_size(array_bytes: int) -> str:
    return f"{array_bytes / 2**30:.3g} GiB" if array_bytes >= 2**30 else f"{array_bytes / 2**20:.3g} MiB"


def quality_data(report: Report) -> ChartData:
    """The primary metric over the loss of quality: of accuracy where it was measured, else the share of positions whose
    most likely token is another one than fp32's.

    Raises SpecError where no result has both.
    """
    timed = [each for each in report.results if primary_of(each)["value"] is not None]
    name = first_measured(timed, tuple(LOSSES))
    if name is None:
        raise SpecError(
            "No result has a quality to draw; measure a trained model, such as bundled:tiny, with the meter 'quality'."
        )
    panel = Panel(
        title="quality",
        form=Form.LOSS,
        axis=_axis(report),
        x_axis=LOSSES[name],
        marks=tuple(_point(each, *loss) for each in timed if (loss := loss_of(each, name))),
        missing={label_of(each): reason_of(each, name) for each in timed if not loss_of(each, name)},
    )
    return _one(report, panel)


def throughput_data(report: Report) -> ChartData:
    """The primary metric over the median latency of a request. Raises SpecError where none has both."""
    marks = [
        _point(each, latency["value"] * 1e3, interval_of(latency, 1e3))
        for each in report.results
        if (latency := figure_of(each, "latency_s")) and primary_of(each)["value"] is not None
    ]
    if not marks:
        raise SpecError(
            "No result has a latency to draw; measure a workload that has one, such as batch_sweep."
        )
    axis = "latency of a request (ms)"
    missing = {
        label_of(each): reason_of(each, "latency_s")
        for each in report.results
        if not figure_of(each, "latency_s")
    }
    panel = Panel(
        title="throughput",
        form=Form.LINES,
        axis=_axis(report),
        x_axis=axis,
        marks=tuple(marks),
        missing=missing,
    )
    return _one(report, panel)


def _point(result: Document, x: float, x_ci: tuple[float, float] | None) -> Mark:
    primary = primary_of(result)
    return Mark(
        label=label_of(result),
        series=label_of(result),
        x=x,
        x_ci=x_ci,
        value=primary["value"],
        ci=interval_of(primary),
        text=with_interval(primary),
        valid=is_valid(result),
        source=str(result["id"]),
    )


def _axis(report: Report) -> str:
    return heading(report.results[0]["variant"]["primary_metric"])


def _one(report: Report, panel: Panel) -> ChartData:
    return ChartData(title=report.title, panels=(panel,), origin=origin_line(report.results))


LATENCIES = ("latency_s", "step_s")
MEMORIES = ("peak_bytes", "weight_bytes", "host_peak_bytes")
"""The preferred metric first: the accelerator's peak is known on a GPU alone."""
OF_PRECISION = PRECISION_ALONE | {"native_decode", "mixed_precision"}
"""Techniques by which a variant is one of a precision, if it has no others."""


def precision_data(report: Report) -> ChartData:
    """Variants that differ in their precision alone. Raises SpecError where none has a latency or a memory."""
    shown = [result for result in report.results if _is_of_precision(result)]
    latency, memory = first_measured(shown, LATENCIES), first_measured(shown, MEMORIES)
    if latency is None and memory is None:
        raise SpecError(
            "No result has a latency or a memory of a precision; run `optigpu ladder --model preset:gpt2 "
            "--stack bf16` or another technique of the layer quantization."
        )
    return ChartData(
        title=report.title,
        panels=(
            _precision_panel("Latency", shown, latency or LATENCIES[0], 1e3, "ms"),
            _precision_panel("Memory", shown, memory or MEMORIES[0], 1e-6, "MB"),
        ),
        note="Lines: 95% intervals. Dashed: not valid. Less is better.",
        origin=origin_line(shown),
    )


def _is_of_precision(result: Document) -> bool:
    return {technique["name"] for technique in result["variant"]["stack"]} <= OF_PRECISION


def _precision_panel(title: str, results: Sequence[Document], name: str, scale: float, unit: str) -> Panel:
    return metric_panel(title, results, name, scale, unit, label=precision_label)


def precision_label(result: Document) -> str:
    """A variant's label after its precision, where the stack says one: "int8: int8_weight_only"."""
    variant = result["variant"]
    if not variant["model"]:
        return str(variant["label"])
    known = [each for each in get_args(Precision) if has_precision(each, tuple(variant["stack"]))]
    named = not known or str(variant["label"]).startswith(known[0])
    return str(variant["label"]) if named else f"{known[0]}: {variant['label']}"
