"""The tables of `layers` that need an NVIDIA GPU: attention over lengths, compiled GPT-2, the ladder of an 8B model.

Measured by the engine as any job is; without a GPU there are no figures, and the document says why.
"""

from dataclasses import dataclass, field
from typing import Any

from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.report.formats import console
from optigpu.vocabulary import DeviceKind

NO_GPU = "not measured: this machine has no NVIDIA GPU"
LLAMA = {
    "workload": {"kind": "generate", "prompt_tokens": 128, "new_tokens": 128},
    "model": "preset:llama-3.1-8b",
    "device": "cuda",
}
COMPILED = [{"name": "static_kv_cache"}, {"name": "torch_compile", "mode": "reduce-overhead"}]
JOBS: dict[str, dict[str, Any]] = {
    "attention": {
        "workload": {"kind": "attention", "dtype": "bfloat16", "heads": 32, "head_size": 128},
        "device": "cuda",
    },
    "gpt2": {
        "workload": {"kind": "generate", "prompt_tokens": 32, "new_tokens": 128},
        "model": "preset:gpt2",
        "device": "cuda",
        "plan": "ladder",
        "stack": [{"name": "bf16"}, {"name": "static_kv_cache"}, {"name": "torch_compile"}, {"name": "cuda_graphs"}],
    },
    "llama bf16": LLAMA | {"plan": "ladder", "stack": [{"name": "bf16"}, *COMPILED]},
    "llama int8": LLAMA | {"plan": "ladder", "stack": [{"name": "bf16"}, {"name": "int8_weight_only"}, *COMPILED]},
    "llama int4": LLAMA | {"plan": "ladder", "stack": [{"name": "bf16"}, {"name": "int4_weight_only"}, *COMPILED]},
}  # fmt: skip
"""What is measured, as jobs."""


@dataclass(frozen=True)
class GpuTables:
    """The results of the jobs: their documents by name, and the goals with whether they were reached."""

    document: dict[str, Any]
    goals: list[tuple[str, bool]] = field(default_factory=list)


def measured() -> GpuTables:
    """Runs every job on the GPU; without a GPU the document has the reason."""
    if not probe().has(DeviceKind.CUDA):
        console().print(f"gpu: {NO_GPU}", markup=False)
        return GpuTables({"reason": NO_GPU})
    reports: dict[str, Report] = {}
    for name, document in JOBS.items():
        reports[name] = run(JobSpec.model_validate(document), lambda _: None)
        for result in reports[name].results:
            console().print(f"{name}: {result.variant.label}: {_figures(result.metrics)}", markup=False)
    documents = {name: report.document() for name, report in reports.items()}
    return GpuTables(documents, [*_attention_goal(reports["attention"]), *_gpt2_goal(reports["gpt2"])])


def _figures(metrics: Any) -> str:
    shown = ("tokens_per_s", "latency_s", "peak_bytes", "weight_bytes", "mbu", "mfu", "headroom")
    values = {name: metrics[name].value for name in shown if name in metrics}
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)


def _attention_goal(report: Report) -> list[tuple[str, bool]]:
    """Fused attention at length 8192 at least three times as fast as the standard one."""
    latency_s = {
        result.variant.label.split(":")[0]: result.metrics["latency_s"].value
        for result in report.results
        if "8192" in result.variant.label
    }
    standard = next((value for label, value in latency_s.items() if "standard" in label), None)
    fused = next((value for label, value in latency_s.items() if "fused" in label), None)
    if not standard or not fused:
        return [("fused attention at 8192 at least 3x the standard one: not measured", False)]
    ratio = standard / fused
    return [(f"fused attention at 8192 at least 3x the standard one: {ratio:.2f}x", ratio >= 3)]


def _gpt2_goal(report: Report) -> list[tuple[str, bool]]:
    """The whole stack at least ten times the eager baseline."""
    rates = [result.metrics["tokens_per_s"].value for result in report.results]
    if len(rates) < 2 or not rates[0] or not rates[-1]:
        return [("torch_compile + cuda_graphs on gpt2 at least 10x eager: not measured", False)]
    ratio = rates[-1] / rates[0]
    return [(f"torch_compile + cuda_graphs on gpt2 at least 10x eager: {ratio:.2f}x", ratio >= 10)]
