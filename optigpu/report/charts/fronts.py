"""One figure over another: with a line through what no other surpasses; and speed and latency over the size of the
batch, the rate of arrivals, or the length of the sequence."""

from collections.abc import Callable, Collection, Sequence

from optigpu.documents.endpoints import engine_name
from optigpu.report.charts.marks import (
    ChartData,
    Form,
    Interval,
    Panel,
    Report,
    estimate,
    figure_of,
    first_measured,
    is_valid,
    label_of,
    mark_of,
    missing_of,
    of_panels,
    primary_of,
    reason_of,
)
from optigpu.report.rows import heading
from optigpu.statistics.estimates import Between, unsurpassed
from optigpu.vocabulary import METRICS, Better, Document, SpecError

MEMORIES = {"peak_bytes": "peak memory", "weight_bytes": "bytes of the weights"}
"""The preferred metric first: the accelerator's peak is known on a GPU alone."""
BYTES, KLD = "weight_bytes", "kld_mean"
DIVERGENCE = "mean divergence from fp32 (nat)"


def with_front(panel: Panel, ranked: Collection[str | None]) -> Panel:
    """The panel with what no other surpasses marked as its front, among the marks with a source in `ranked`."""
    own = [each for each in panel.marks if each.source in ranked]
    best = unsurpassed(
        [
            (_bounds(each.value, each.ci, panel.better), _bounds(each.x, each.x_ci, panel.x_better))
            for each in own
        ]
    )
    front = {own[number].source for number in best}
    marks = (each.model_copy(update={"on_front": each.source in front}) for each in panel.marks)
    return panel.model_copy(update={"marks": tuple(marks)})


def _bounds(value: float | None, ci: Interval | None, better: Better) -> Between:
    """More is better."""
    low, high = ci or (value or 0.0, value or 0.0)
    return (low, high) if better is Better.HIGHER else (-high, -low)


def _front_of(results: Sequence[Document], panel: Panel) -> Panel:
    return with_front(panel, [str(each["id"]) for each in results if is_valid(each)])


def pareto_data(report: Report) -> ChartData:
    """Raises SpecError where there is nothing to choose from, and for results that cannot be compared."""
    shown = report.measured
    memory = first_measured(shown, MEMORIES)
    if memory is None:
        raise SpecError(
            "No result has both a speed and the bytes of its weights; run `optigpu run --model bundled:tiny "
            "--beside llama_cpp/gguf`."
        )
    if (
        len({(each["variant"]["workload_digest"], each["environment"]["hardware_class"]) for each in shown})
        > 1
    ):
        raise SpecError(
            "Results of several workloads or machines cannot surpass each other; draw those of one workload on one "
            "machine."
        )
    what = MEMORIES[memory]
    return of_panels(
        report,
        shown,
        _panel(shown, f"Speed over the {what}", memory, f"{what} (MB)", 1e-6),
        _panel(shown, "Speed over the divergence from fp32", KLD, DIVERGENCE),
        note="Joined: what no other valid result surpasses, as good on both axes and better on one; speeds whose "
        "intervals overlap count as equal. Lines: 95% intervals. Hollow: not valid.",
    )


def _panel(results: Sequence[Document], title: str, other: str, x_axis: str, scale: float = 1.0) -> Panel:
    name = results[0]["variant"]["primary_metric"]
    panel = Panel(
        title=title,
        form=Form.FRONT,
        axis=heading(name),
        x_axis=x_axis,
        better=METRICS[name].better,
        logarithmic=other == KLD,
        marks=tuple(
            mark_of(each, estimate(each["metrics"][name]), estimate(metric, scale))
            for each in results
            if (metric := figure_of(each, other))
        ),
        missing=missing_of(results, other),
    )
    return _front_of(results, panel)


def bits_data(report: Report) -> ChartData:
    """Speed is not looked at. Raises SpecError where no result has both figures, and for those of several models."""
    shown = [each for each in report.results if figure_of(each, BYTES) and figure_of(each, KLD)]
    if not shown:
        raise SpecError(
            "No result has both the bytes of its weights and a divergence from fp32; run `optigpu run --model "
            "bundled:tiny --stack native_decode --meters latency,memory,quality`."
        )
    if len({each["variant"]["model"] for each in shown}) > 1:
        raise SpecError("Bytes of several models cannot surpass each other; draw the results of one model.")
    panel = Panel(
        title="Bytes of the weights over the divergence from fp32",
        form=Form.FRONT,
        axis="bytes of the weights (MB)",
        x_axis=DIVERGENCE,
        logarithmic=True,
        logarithmic_values=True,
        better=Better.LOWER,
        marks=tuple(
            mark_of(each, (each["metrics"][BYTES]["value"] * 1e-6, None), estimate(each["metrics"][KLD]))
            for each in shown
        ),
        missing=missing_of(report.results, BYTES) | missing_of(report.results, KLD),
    )
    return of_panels(
        report,
        shown,
        _front_of(shown, panel),
        note="Joined: what no other valid result surpasses, as small and as close and better in one of the two; "
        "divergences whose intervals overlap count as equal. Lines: 95% intervals. Hollow: not valid.",
    )


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
