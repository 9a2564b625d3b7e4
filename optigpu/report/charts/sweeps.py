"""Speed and latency over the size of the batch, the rate of arrivals, or the length of the sequence."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from optigpu.documents.endpoints import engine_name
from optigpu.report.charts.marks import (
    ChartData,
    Form,
    Mark,
    Panel,
    Report,
    figure_of,
    interval_of,
    is_valid,
    label_of,
    primary_of,
    reason_of,
)
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError

FEW = "too few requests for a 95th percentile; measure longer with --max-seconds"


@dataclass(frozen=True)
class Swept:
    """A workload that is measured at several points: its kind, a command that does it, and the name of a point."""

    kind: str
    command: str
    point: Callable[[Document], str]


def _batch(workload: Document) -> str:
    return f"batch {'/'.join(map(str, workload['batch_sizes']))}"


def _load(workload: Document) -> str:
    if workload.get("rates"):
        return ", ".join(f"{rate:g}/s" for rate in workload["rates"])
    clients = f" {workload['clients']}" if workload.get("clients") else ""
    return f"{workload['scenario']}{clients}"


BATCHES = Swept(
    "batch_sweep",
    "`optigpu run --workload batch_sweep --model preset:gpt2 --batch-sizes 1,2,4,8`",
    _batch,
)
LOADS = Swept("serve", "`optigpu run --workload serve --model preset:gpt2 --rates 1,2,4,8`", _load)


def batches_data(report: Report) -> ChartData:
    """Results of batch_sweep. Raises SpecError where none has a 95th percentile of the latency."""
    return _data(report, BATCHES)


def loads_data(report: Report) -> ChartData:
    """Results of serve, of one scenario or several. Raises SpecError as `batches_data` does."""
    return _data(report, LOADS)


def _data(report: Report, what: Swept) -> ChartData:
    swept = [each for each in report.results if each["variant"]["workload"].get("kind") == what.kind]
    shown = [each for each in swept if _p95(each) is not None and primary_of(each)["value"] is not None]
    if not swept:
        raise SpecError(f"No result is of {what.kind}; run {what.command}.")
    if not shown:
        raise SpecError(
            f"No result of {what.kind} has a 95th percentile of the latency: there were too few requests. Measure "
            "longer, for example with --max-seconds 60."
        )
    return ChartData(
        title=report.title,
        panels=(_panel(swept, shown, what),),
        note="Up and to the left is better. Lines join what has the same stack and engine. Bars: 95% intervals.",
        origin=origin_line(shown),
    )


def _p95(result: Document) -> float | None:
    """Seconds."""
    found: float | None = (result["metrics"].get("latency_s") or {}).get("p95")
    return found


def _panel(swept: Sequence[Document], shown: Sequence[Document], what: Swept) -> Panel:
    engines = {_engine(each["variant"]) for each in shown}
    return Panel(
        title="Throughput against latency",
        form=Form.LINES,
        axis=heading(shown[0]["variant"]["primary_metric"]),
        x_axis="95th percentile of the latency of a request (ms)",
        marks=tuple(_mark(each, what, engines) for each in shown),
        missing={label_of(each): _reason(each) for each in swept if each not in shown},
    )


def _reason(result: Document) -> str:
    reason = reason_of(result, "latency_s")
    return FEW if reason == "not measured" else reason


def _mark(result: Document, what: Swept, engines: Collection[str]) -> Mark:
    variant, primary = result["variant"], primary_of(result)
    stack = " + ".join(technique["name"] for technique in variant["stack"]) or "baseline"
    return Mark(
        label=label_of(result),
        series=stack if len(engines) < 2 else f"{stack}, {_engine(variant)}",
        x=(_p95(result) or 0.0) * 1e3,
        value=primary["value"],
        ci=interval_of(primary),
        text=what.point(variant["workload"]),
        valid=is_valid(result),
        source=str(result["id"]),
    )


def _engine(variant: Document) -> str:
    return engine_name(variant["backend"], variant.get("endpoint"))


def lengths_data(report: Report) -> ChartData:
    """Raises SpecError where no result is of the workload attention and has a latency."""
    shown = [each for each in report.results if each["variant"]["workload"].get("kind") == "attention"]
    if not any(figure_of(each, "latency_s") for each in shown):
        raise SpecError(
            "No result is of attention; run `optigpu run --workload attention --lengths 128,256,512,1024`."
        )
    return ChartData(
        title=report.title,
        panels=(
            _length_panel("Time", shown, "latency_s", 1e3, "latency of a call (ms)"),
            _length_panel("Memory", shown, "peak_bytes", 1e-6, "peak memory of a call (MB)"),
        ),
        note="Both axes are logarithmic. Bars: 95% intervals. Less is better.",
        origin=origin_line(shown),
    )


def _length_panel(title: str, results: Sequence[Document], name: str, scale: float, axis: str) -> Panel:
    found = [(result, figure_of(result, name)) for result in results]
    return Panel(
        title=title,
        form=Form.LINES,
        axis=axis,
        x_axis="length of the sequence (tokens)",
        logarithmic=True,
        marks=tuple(
            Mark(
                label=label_of(result),
                series="/".join(result["variant"]["workload"]["implementations"]),
                x=max(result["variant"]["workload"]["lengths"]),
                value=metric["value"] * scale,
                ci=interval_of(metric, scale),
                valid=is_valid(result),
                source=str(result["id"]),
            )
            for result, metric in found
            if metric and metric["value"] > 0
        ),
        missing={label_of(result): reason_of(result, name) for result, metric in found if not metric},
    )
