"""Latency and memory of each precision, side by side."""

from collections.abc import Sequence
from typing import get_args

from optigpu.claims.stacks import PRECISION_ALONE, has_precision
from optigpu.claims.terms import Precision
from optigpu.report.charts.marks import ChartData, Panel, Report
from optigpu.report.charts.metrics import first_measured, metric_panel
from optigpu.report.origin import origin_line
from optigpu.vocabulary import Document, SpecError

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
            _panel("Latency", shown, latency or LATENCIES[0], 1e3, "ms"),
            _panel("Memory", shown, memory or MEMORIES[0], 1e-6, "MB"),
        ),
        note="Lines: 95% intervals. Striped: not valid. Less is better.",
        origin=origin_line(shown),
    )


def _is_of_precision(result: Document) -> bool:
    return {technique["name"] for technique in result["variant"]["stack"]} <= OF_PRECISION


def _panel(title: str, results: Sequence[Document], name: str, scale: float, unit: str) -> Panel:
    return metric_panel(title, results, name, scale, unit, label=precision_label)


def precision_label(result: Document) -> str:
    """A variant's label after its precision, where the stack says one: "int8: int8_weight_only"."""
    variant = result["variant"]
    if not variant["model"]:
        return str(variant["label"])
    known = [each for each in get_args(Precision) if has_precision(each, tuple(variant["stack"]))]
    named = not known or str(variant["label"]).startswith(known[0])
    return str(variant["label"]) if named else f"{known[0]}: {variant['label']}"
