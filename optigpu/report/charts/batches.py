"""Throughput against the 95th percentile of the latency, over the size of the batch."""

from collections.abc import Sequence

from optigpu.report.canvas import is_valid
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report
from optigpu.report.charts.metrics import interval_of, label_of, primary_of, reason_of
from optigpu.report.origin import origin_line
from optigpu.report.rows import heading
from optigpu.vocabulary import Document, SpecError

FEW = "too few requests for a 95th percentile; measure longer with --max-seconds"


def batches_data(report: Report) -> ChartData:
    """Results of batch_sweep. Raises SpecError where none has a 95th percentile of the latency."""
    swept = [each for each in report.results if each["variant"]["workload"].get("kind") == "batch_sweep"]
    shown = [each for each in swept if _p95(each) is not None and primary_of(each)["value"] is not None]
    if not swept:
        raise SpecError(
            "No result is of batch_sweep; run `optigpu run --workload batch_sweep --model preset:gpt2 "
            "--batch-sizes 1,2,4,8`."
        )
    if not shown:
        raise SpecError(
            "No result of batch_sweep has a 95th percentile of the latency: there were too few requests. Measure "
            "longer, for example with --max-seconds 60."
        )
    return ChartData(
        title=report.title,
        panels=(_panel(swept, shown),),
        note="Up and to the left is better. Lines join what has the same stack. Bars: 95% intervals. "
        "Not shown, for too few requests: " + (_names(swept, shown) or "none") + ".",
        origin=origin_line(shown),
    )


def _names(swept: Sequence[Document], shown: Sequence[Document]) -> str:
    return ", ".join(label_of(each) for each in swept if each not in shown)


def _p95(result: Document) -> float | None:
    """Seconds."""
    found: float | None = (result["metrics"].get("latency_s") or {}).get("p95")
    return found


def _panel(swept: Sequence[Document], shown: Sequence[Document]) -> Panel:
    return Panel(
        title="Throughput against latency",
        form=Form.LINES,
        axis=heading(shown[0]["variant"]["primary_metric"]),
        x_axis="95th percentile of the latency of a request (ms)",
        marks=tuple(_mark(each) for each in shown),
        missing={label_of(each): _reason(each) for each in swept if each not in shown},
    )


def _reason(result: Document) -> str:
    reason = reason_of(result, "latency_s")
    return FEW if reason == "not measured" else reason


def _mark(result: Document) -> Mark:
    variant, primary = result["variant"], primary_of(result)
    sizes = "/".join(map(str, variant["workload"]["batch_sizes"]))
    return Mark(
        label=label_of(result),
        series=" + ".join(technique["name"] for technique in variant["stack"]) or "baseline",
        x=(_p95(result) or 0.0) * 1e3,
        value=primary["value"],
        ci=interval_of(primary),
        text=f"batch {sizes}",
        valid=is_valid(result),
        source=str(result["id"]),
    )
