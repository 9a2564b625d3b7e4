"""The bytes of the weights over the divergence from fp32, with a line through the results that no other surpasses."""

from optigpu.report.canvas import is_valid
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel, Report
from optigpu.report.charts.metrics import figure_of, interval_of, label_of, reason_of
from optigpu.report.origin import origin_line
from optigpu.statistics.front import Bounds, unsurpassed
from optigpu.vocabulary import Better, Document, SpecError

BYTES, DIVERGENCE = "weight_bytes", "kld_mean"


def bits_data(report: Report) -> ChartData:
    """Speed is not looked at. Raises SpecError where no result has both figures, and for those of several models."""
    shown = [each for each in report.results if figure_of(each, BYTES) and figure_of(each, DIVERGENCE)]
    if not shown:
        raise SpecError(
            "No result has both the bytes of its weights and a divergence from fp32; run `optigpu run --model "
            "bundled:tiny --stack native_decode --meters latency,memory,quality`."
        )
    if len({each["variant"]["model"] for each in shown}) > 1:
        raise SpecError("Bytes of several models cannot surpass each other; draw the results of one model.")
    valid = [each for each in shown if is_valid(each)]
    best = {valid[number]["id"] for number in unsurpassed([_point(each) for each in valid])}
    panel = Panel(
        title="Bytes of the weights over the divergence from fp32",
        form=Form.FRONT,
        axis="bytes of the weights (MB)",
        x_axis="mean divergence from fp32 (nat)",
        logarithmic=True,
        logarithmic_values=True,
        better=Better.LOWER,
        marks=tuple(_mark(each, on_front=each["id"] in best) for each in shown),
        missing={label_of(each): reason_of(each, DIVERGENCE) for each in report.results if each not in shown},
    )
    return ChartData(
        title=report.title,
        panels=(panel,),
        note="Joined: what no other valid result surpasses, as small and as close and better in one of the two; "
        "divergences whose intervals overlap count as equal. Lines: 95% intervals. Hollow: not valid.",
        origin=origin_line(shown),
    )


def _point(result: Document) -> tuple[Bounds, Bounds]:
    """More is better."""
    size, divergence = result["metrics"][BYTES]["value"], result["metrics"][DIVERGENCE]
    low, high = interval_of(divergence) or (divergence["value"], divergence["value"])
    return (-size, -size), (-high, -low)


def _mark(result: Document, *, on_front: bool) -> Mark:
    divergence = result["metrics"][DIVERGENCE]
    return Mark(
        label=label_of(result),
        x=divergence["value"],
        x_ci=interval_of(divergence),
        value=result["metrics"][BYTES]["value"] * 1e-6,
        text=label_of(result) if on_front else "",
        valid=is_valid(result),
        on_front=on_front,
        source=str(result["id"]),
    )
