"""The words of claims: units as they are printed, precisions, and metrics that only published figures have."""

from typing import Literal

from optigpu.vocabulary import COUNTED_METRICS, METRICS

UNITS: dict[str, float] = {
    "TFLOPS": 1.0,
    "tok/s": 1.0,
    "img/s": 1.0,
    "FPS": 1.0,
    "FPS/W": 1.0,
    "ms": 1e-3,
    "s": 1.0,
    "GB": 1e9,
    "MB": 1e6,
    "GiB": 2.0**30,
    "W": 1.0,
    "x": 1.0,
    "1": 1.0,
    "%": 0.01,
    "% lost": 1.0,
    "INR": 1.0,
}
"""Printed units, as multiples of the metric's own unit. `% lost` is that of accuracy_loss_percent."""
BINARY_UNITS: dict[str, float] = {"GB": 2.0**30, "MB": 2.0**20, "GiB": 2.0**30}
"""The other meaning of printed bytes: PyTorch's counters are often divided by powers of 1024 and called GB."""

Precision = Literal["fp32", "fp16", "bf16", "int8", "llm_int8", "int4", "nf4", "gptq", "awq", "q4_k_m"]
Workload = Literal["matmul", "generate", "kv_cache", "classify", "attention", "inference", "train_step"]
"""Kinds of workloads, and inference of which the text says no more."""

CLAIM_METRICS: dict[str, str] = {
    "speedup": "times as fast",
    "memory_ratio": "times less memory",
    "growth_exponent": "time grows with this power of the size",
    "overhead_s": "fixed time that is added to each run",
    "images_per_j": "classified images per joule",
    "peak_bytes_saved": "share of the peak memory that is saved",
    "weight_bytes_saved": "share of the bytes of weights that is saved",
    "latency_saved": "share of the time that is saved",
    "accuracy_kept": "share of the accuracy that is kept",
    "peak_flop_share": "share of the published peak rate of operations",
    "peak_bandwidth_share": "share of the published peak memory bandwidth",
    "throughput_gained": "share of the throughput that is gained",
    "batch_scaling": "times the largest batch that fits",
    "efficiency_ratio": "times the work per energy",
    "price": "price of the hardware",
}
"""Metrics that only claims have, and what each counts."""

QUALITY_METRICS = frozenset({"accuracy", "accuracy_loss_percent", "perplexity", "perplexity_delta"})
"""Metrics of a text or a test. Two figures compare only if both say which, and both are of trained weights."""
SAME_EVERYWHERE = COUNTED_METRICS | QUALITY_METRICS
"""Metrics that a model and its stack decide, whatever the machine and the workload."""
ON_ANY_HARDWARE = SAME_EVERYWHERE | {"peak_bytes"}
"""Metrics that are compared whatever hardware the claim names. What a GPU allocates depends on the workload alone."""
BYTES = frozenset(name for name, metric in METRICS.items() if metric.unit == "B")
"""Metrics in bytes; a claim of one needs to name no hardware."""
NEEDS_HARDWARE = frozenset(
    {
        "tflops", "tokens_per_s", "images_per_s", "trained_tokens_per_s", "latency_s", "tpot_s", "step_s", "compile_s",
        "speedup", "throughput_gained", "latency_saved", "power_w", "images_per_j", "gpu_utilization",
        "peak_flop_share", "peak_bandwidth_share",
    }
)  # fmt: skip
"""Metrics that depend on the machine. Bytes and quality do not; growth and ratios depend on other claims."""
