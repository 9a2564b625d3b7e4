"""Reports made up for the tests of charts: a ladder, attention over lengths, a sweep of batches, matrix products."""

from dataclasses import replace
from typing import Any

from optigpu.documents.events import Span
from optigpu.documents.facts import Footprint, RunFacts
from optigpu.documents.result import Attribution, AttributionRow, Gain, MetricSummary, Verdict, VerdictReason
from optigpu.report.charts import CHARTS
from optigpu.report.charts.marks import Report
from optigpu.roofline import roofline_of
from optigpu.vocabulary import Role
from optigpu.workloads.generate import Generate
from tests.unit.made_results import ATTRIBUTION as BROKEN_ATTRIBUTION
from tests.unit.made_results import GENERATE, a_rung, metric, result
from tests.unit.test_roofline import GPT2, PEAKS

VALID = Verdict(valid=True)
WRONG = Verdict(valid=False, reasons=(VerdictReason.OUTPUT_INVALID,), notes=("The logits hold NaN.",))
THREE = "bf16 + int8_weight_only + static_kv_cache"
LADDER: tuple[tuple[str, Role, float, int, str, float, Verdict], ...] = (
    ("baseline", Role.BASELINE, 15.1, 494_612_480, "float32", 1.0, VALID),
    ("bf16", Role.ALONE, 21.7, 247_306_240, "bfloat16", 0.9931, VALID),
    ("int8_weight_only", Role.ALONE, 38.4, 124_900_000, "float32", 0.978, VALID),
    ("static_kv_cache", Role.ALONE, 15.9, 494_612_480, "float32", 1.0, VALID),
    (THREE, Role.CUMULATIVE, 44.0, 124_800_000, "bfloat16", 0.971, VALID),
    (f"{THREE} + torch_compile", Role.CUMULATIVE, 71.3, 124_800_000, "bfloat16", 0.97, VALID),
    ("no_kv_cache", Role.ALONE, 2.2, 494_612_480, "float32", 1.0, WRONG),
)  # fmt: skip
"""Label, role, tokens per second, streamed bytes, dtype, top-1 agreement and verdict of made-up variants."""


def made(
    index: int, label: str, role: Role, rate: float, streamed: int, dtype: str, top1: float, verdict: Verdict
) -> dict[str, Any]:
    model = Footprint(GPT2.facts, streamed, GPT2.row_bytes)
    facts = RunFacts(dtype=dtype, kv_cache="dynamic", footprint=model)
    metrics: dict[str, MetricSummary] = {
        "tokens_per_s": metric("tokens_per_s", rate, (rate * 0.96, rate * 1.035)),
        "ttft_s": metric("ttft_s", 0.1),
        "latency_s": metric("latency_s", 0.1 + 63 / rate, (0.1 + 62 / rate, 0.1 + 65 / rate)),
        "top1_agreement": metric("top1_agreement", top1, (max(0.0, top1 - 0.004), min(1.0, top1 + 0.003))),
    }
    found = roofline_of(Generate.model_validate(GENERATE), metrics, facts, PEAKS, None)
    whole = result(index, role, label, metrics | found.metrics, verdict)
    update = {"bound": found.bound, "facts": RunFacts(roofline=found.facts)}
    document: dict[str, Any] = whole.model_copy(update=update).model_dump(mode="json")
    return document


RESULTS = [made(index, *row) for index, row in enumerate(LADDER)]
TITLE = "generate preset:gpt2 on 2x Test CPU"
STACK = ("bf16", "int8_weight_only", "static_kv_cache", "torch_compile")


def with_stack(result: dict[str, Any]) -> dict[str, Any]:
    """The result with the stack that its label names."""
    label = result["variant"]["label"]
    names = [] if label == "baseline" else label.split(" + ")
    return result | {"variant": result["variant"] | {"stack": [{"name": name} for name in names]}}


def with_metrics(result: dict[str, Any], **values: tuple[float, ...]) -> dict[str, Any]:
    """The result with further metrics: the value, and the two ends of its interval if it has one."""
    more = {
        name: metric(name, value[0], (value[1], value[2]) if value[1:] else None).model_dump(mode="json")
        for name, value in values.items()
    }
    return result | {"metrics": result["metrics"] | more}


def gain(ratio: float, *reasons: VerdictReason) -> Gain:
    return Gain(ratio=ratio, ci=(ratio * 0.95, ratio * 1.04), compared_with=0, reasons=reasons)


def _row(place: int) -> AttributionRow:
    label, role, rate = LADDER[place][:3]
    return a_rung(
        place,
        label,
        role,
        technique="static_kv_cache" if place == 4 else label.rsplit(" + ", 1)[-1],
        speedup=None if role is Role.BASELINE else gain(rate / 15.1),
        added=gain(1.62) if role is Role.CUMULATIVE or place == 1 else None,
    )


BYTES = (497.8e6, 248.9e6, 281.6e6, 497.8e6, 140.8e6, 140.8e6, 497.8e6)
LADDER_RESULTS = [
    with_metrics(with_stack(each), weight_bytes=(held,)) for each, held in zip(RESULTS, BYTES, strict=True)
]
ATTRIBUTION = Attribution(metric="tokens_per_s", rows=tuple(map(_row, range(len(LADDER)))), best=5)
LADDER_REPORT = Report(TITLE, LADDER_RESULTS, ATTRIBUTION)
DIVERGENCES = (0.0, 0.004, 0.02, 0.0, 0.03, 0.031, 0.0)
PARETO_REPORT = Report(
    TITLE,
    [
        with_metrics(each, kld_mean=(lost, lost * 0.9, lost * 1.1))
        for each, lost in zip(LADDER_RESULTS, DIVERGENCES, strict=True)
    ],
)
BROKEN_REPORT = Report(TITLE, LADDER_RESULTS, BROKEN_ATTRIBUTION)


def _of(workload: dict[str, Any], label: str, primary: str, **values: tuple[float, ...]) -> dict[str, Any]:
    """A result of another workload."""
    base = made(0, label, Role.SINGLE, 10.0, 10**9, "float32", 1.0, VALID) | {"metrics": {}}
    variant = base["variant"] | {"workload": workload, "model": None, "primary_metric": primary, "stack": []}
    return with_metrics(base | {"variant": variant}, **values)


def _attention(implementation: str, length: int, milliseconds: float, megabytes: float) -> dict[str, Any]:
    workload = {
        "kind": "attention",
        "lengths": [length],
        "implementations": [implementation],
        "dtype": "float32",
    }
    seconds = milliseconds / 1e3
    return _of(
        workload,
        f"{implementation} {length}",
        "latency_s",
        latency_s=(seconds, seconds * 0.95, seconds * 1.05),
        peak_bytes=(megabytes * 1e6,),
    )


ATTENTION_REPORT = Report(
    "attention on 2x Test CPU",
    [
        _attention("standard", 128, 0.4, 1.2),
        _attention("standard", 512, 6.1, 14.0),
        _attention("standard", 2048, 99.0, 210.0),
        _attention("fused", 128, 0.3, 0.8),
        _attention("fused", 512, 3.2, 3.1),
        _attention("fused", 2048, 51.0, 12.6),
    ],
)


def _at(workload: dict[str, Any], label: str, rate: float, p95: float | None) -> dict[str, Any]:
    """A result of a load: tokens a second at a 95th percentile of the latency."""
    latency = (0.9 * (p95 or 1.0), 0.8, 1.1)
    found = _of(
        workload, label, "tokens_per_s", tokens_per_s=(rate, rate * 0.97, rate * 1.02), latency_s=latency
    )
    found["metrics"]["latency_s"]["p95"] = p95
    return found


def _batch(size: int, rate: float, p95: float | None) -> dict[str, Any]:
    workload = {"kind": "batch_sweep", "batch_sizes": [size], "prompt_tokens": 32, "new_tokens": 32}
    return _at(workload, f"batch {size}", rate, p95)


def _serve(rate: float, tokens: float, p95: float | None) -> dict[str, Any]:
    return _at({"kind": "serve", "scenario": "Server", "rates": [rate]}, f"{rate:g}/s", tokens, p95)


BATCHES_REPORT = Report(
    "batch_sweep on 2x Test CPU",
    [_batch(8, 118.0, 2.4), _batch(1, 31.0, 0.9), _batch(4, 84.0, 1.6), _batch(16, 131.0, None)],
)


LOADS_REPORT = Report(
    "serve on 2x Test CPU",
    [_serve(1, 31.0, 0.9), _serve(4, 118.0, 2.4), _serve(2, 62.0, 1.2), _serve(8, 131.0, None)],
)


def _matmul(size: int, rate: float) -> dict[str, Any]:
    workload = {"kind": "matmul", "sizes": [size], "dtypes": ["float32"]}
    return _of(workload, f"float32 {size}", "tflops", tflops=(rate, rate * 0.97, rate * 1.03))


MATMUL_REPORT = Report("matmul on 2x Test CPU", [_matmul(4096, 0.3), _matmul(512, 0.2)])
TIMELINE = tuple(
    Span(index=index, replicate=0, doing=doing, began_s=began_s, seconds=seconds, cpu_s=seconds)
    for index, doing, began_s, seconds in (
        (None, "computing the quality reference", 0.0, 4.0),
        (0, "loading", 4.0, 2.5),
        (1, "loading", 6.5, 2.0),
        (0, "measuring", 8.5, 6.0),
        (1, "measuring", 8.6, 6.0),
    )
)
REPORTS = {
    **dict.fromkeys(CHARTS, LADDER_REPORT),
    "timeline": replace(LADDER_REPORT, timeline=TIMELINE),
    "lengths": ATTENTION_REPORT,
    "batches": BATCHES_REPORT,
    "loads": LOADS_REPORT,
    "pareto": PARETO_REPORT,
    "bits": PARETO_REPORT,
    "baselines": MATMUL_REPORT,
}
"""A report that each chart has something to draw of."""


def run_of(report: Report) -> dict[str, Any]:
    """What `optigpu run --format json` prints."""
    attribution = (report.attribution or Attribution(metric="tokens_per_s", rows=())).model_dump(mode="json")
    spec = {"workload": GENERATE, "model": "preset:gpt2"}
    return {"spec": spec, "results": [dict(each) for each in report.results], "attribution": attribution}
