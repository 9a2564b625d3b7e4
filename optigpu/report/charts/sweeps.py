"""Speed and latency over the size of the batch, the rate of arrivals, or the length of the sequence."""

from collections.abc import Callable, Sequence

from optigpu.documents.endpoints import engine_name
from optigpu.report.charts.marks import (
    ChartData,
    Form,
    Panel,
    Report,
    estimate,
    figure_of,
    label_of,
    mark_of,
    missing_of,
    of_panels,
    primary_of,
    reason_of,
)
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError

FEW = "too few requests for a 95th percentile; measure longer with --max-seconds"


def batches_data(report: Report) -> ChartData:
    """Results of batch_sweep. Raises SpecError where none has a 95th percentile of the latency."""
    command = "optigpu run --workload batch_sweep --model preset:gpt2 --batch-sizes 1,2,4,8"
    return _data(
        report,
        "batch_sweep",
        command,
        lambda workload: f"batch {'/'.join(map(str, workload['batch_sizes']))}",
    )


def loads_data(report: Report) -> ChartData:
    """Results of serve, of one scenario or several. Raises SpecError as `batches_data` does."""

    def load(workload: Document) -> str:
        rates = ", ".join(f"{rate:g}/s" for rate in workload.get("rates") or ())
        return rates or " ".join(map(str, filter(None, (workload["scenario"], workload.get("clients")))))

    return _data(report, "serve", "optigpu run --workload serve --model preset:gpt2 --rates 1,2,4,8", load)


def _data(report: Report, kind: str, command: str, point: Callable[[Document], str]) -> ChartData:
    swept = [each for each in report.results if each["variant"]["workload"].get("kind") == kind]
    shown = [each for each in swept if _p95(each) is not None and primary_of(each)["value"] is not None]
    if not swept:
        raise SpecError(f"No result is of {kind}; run `{command}`.")
    if not shown:
        raise SpecError(
            f"No result of {kind} has a 95th percentile of the latency: there were too few requests. Measure "
            "longer, for example with --max-seconds 60."
        )
    engines = {_engine(each) for each in shown}
    reasons = {label_of(each): reason_of(each, "latency_s") for each in swept if each not in shown}
    panel = Panel(
        title="Throughput against latency",
        form=Form.LINES,
        axis=heading(shown[0]["variant"]["primary_metric"]),
        x_axis="95th percentile of the latency of a request (ms)",
        marks=tuple(
            mark_of(
                each,
                estimate(primary_of(each)),
                ((_p95(each) or 0.0) * 1e3, None),
                series=_stack(each) if len(engines) < 2 else f"{_stack(each)}, {_engine(each)}",
                text=point(each["variant"]["workload"]),
            )
            for each in shown
        ),
        missing={label: FEW if why == "not measured" else why for label, why in reasons.items()},
    )
    return of_panels(
        report,
        shown,
        panel,
        note="Up and to the left is better. Lines join what has the same stack and engine. Bars: 95% intervals.",
    )


def _p95(result: Document) -> float | None:
    """Seconds."""
    found: float | None = (result["metrics"].get("latency_s") or {}).get("p95")
    return found


def _stack(result: Document) -> str:
    return " + ".join(technique["name"] for technique in result["variant"]["stack"]) or "baseline"


def _engine(result: Document) -> str:
    return engine_name(result["variant"]["backend"], result["variant"].get("endpoint"))


def lengths_data(report: Report) -> ChartData:
    """Raises SpecError where no result is of the workload attention and has a latency."""
    shown = [each for each in report.results if each["variant"]["workload"].get("kind") == "attention"]
    if not any(figure_of(each, "latency_s") for each in shown):
        raise SpecError(
            "No result is of attention; run `optigpu run --workload attention --lengths 128,256,512,1024`."
        )
    return of_panels(
        report,
        shown,
        _length_panel("Time", shown, "latency_s", 1e3, "latency of a call (ms)"),
        _length_panel("Memory", shown, "peak_bytes", 1e-6, "peak memory of a call (MB)"),
        note="Both axes are logarithmic. Bars: 95% intervals. Less is better.",
    )


def _length_panel(title: str, results: Sequence[Document], name: str, scale: float, axis: str) -> Panel:
    return Panel(
        title=title,
        form=Form.LINES,
        axis=axis,
        x_axis="length of the sequence (tokens)",
        logarithmic=True,
        marks=tuple(
            mark_of(
                each,
                estimate(metric, scale),
                (max(each["variant"]["workload"]["lengths"]), None),
                series="/".join(each["variant"]["workload"]["implementations"]),
            )
            for each in results
            if (metric := figure_of(each, name)) and metric["value"] > 0
        ),
        missing=missing_of(results, name),
    )
