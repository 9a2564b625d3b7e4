"""The marks of the charts that are drawn straight from results: ladder, roofline, quality, throughput."""

from collections.abc import Iterator, Sequence

from optigpu.documents.older import facts_of
from optigpu.report.canvas import is_valid
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report, Roof
from optigpu.report.charts.metrics import bar_of, figure_of, interval_of, label_of, primary_of, reason_of
from optigpu.report.charts.quality import LOSSES, loss_interval
from optigpu.report.charts.roofline import array_size
from optigpu.report.numbers import short, with_interval
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Better, Document


def ladder_data(report: Report) -> ChartData:
    """The primary metric of each variant."""
    marks = tuple(
        bar_of(each, primary_of(each), 1.0, str(each["variant"]["label"]), str(each["variant"]["role"]))
        for each in report.results
        if primary_of(each)["value"] is not None
    )
    return _one(report, Panel(title="ladder", form=Form.BARS, axis=_axis(report), marks=marks))


def roofline_data(report: Report) -> ChartData:
    """GFLOP/s over FLOP/byte of each variant's step, with the roofs; `text` says what bounds it."""
    steps = [(each, (facts_of(each).get("roofline") or {}).get("step")) for each in report.results]
    found = [(each, step) for each, step in steps if step and step["measured_s"] and step["flops"]]
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


def quality_data(report: Report) -> ChartData:
    """The primary metric over the loss of quality, of those that have both."""
    found = ((name, each) for name in LOSSES for each in report.results if loss_interval(each, name))
    name = next((name for name, _ in found), next(iter(LOSSES)))
    marks = [
        _point(each, loss[0], loss[1])
        for each in report.results
        if (loss := loss_interval(each, name)) and primary_of(each)["value"] is not None
    ]
    panel = Panel(
        title="quality", form=Form.LOSS, axis=_axis(report), x_axis=LOSSES[name], marks=tuple(marks)
    )
    return _one(report, panel)


def throughput_data(report: Report) -> ChartData:
    """The primary metric over the median latency of a request."""
    marks = [
        _point(each, latency["value"] * 1e3, interval_of(latency, 1e3))
        for each in report.results
        if (latency := figure_of(each, "latency_s")) and primary_of(each)["value"] is not None
    ]
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
