"""Requests timed in the caller's own process, by the clock, the rounds and the meters of a measuring process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from optigpu.backends.runtime import Runtime
from optigpu.documents.result import Measurement, MetricSummary
from optigpu.facade.benchmark_result import MEBIBYTE, BenchmarkResult
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.latency import run_round
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import DeviceKind, SpecError
from optigpu.workloads.base import Request, Workload

NO_VRAM = "A CPU has no VRAM; the host's peak counts the whole process."
NOT_ASKED = "Energy was not asked for; pass energy=True, which takes a quarter of a minute."


@dataclass(frozen=True)
class Timed:
    """The samples of timed requests, and what the meters read of one more; by the metrics' names."""

    samples: Mapping[str, tuple[float, ...]]
    values: Mapping[str, float]
    reasons: Mapping[str, str]

    def summaries(self) -> dict[str, MetricSummary]:
        """Value, interval and percentiles of each metric, as a result has them."""
        found = {name: Measurement(name=name, reason=why) for name, why in self.reasons.items()}
        samples = {**self.samples, **{name: (value,) for name, value in self.values.items()}}
        found |= {name: Measurement(name=name, samples=(tuple(each),)) for name, each in samples.items()}
        return {name: summarise(each) for name, each in found.items()}

    def benchmark(self, name: str, throughput_of: str) -> BenchmarkResult:
        """Latency, memory, energy and weights, with the reasons for what is missing."""
        latency = self.summaries()["latency_s"]
        total = self.values.get("params_total")
        return BenchmarkResult(
            name=name,
            vram_peak_mb=self._mebibytes("peak_bytes"),
            vram_reserved_mb=self._mebibytes("peak_reserved_bytes"),
            latency_ms_mean=milliseconds(latency.mean),
            latency_ms_p50=milliseconds(latency.p50),
            latency_ms_p95=milliseconds(latency.p95),
            latency_ms_p99=milliseconds(latency.p99),
            params_total=None if total is None else int(total),
            model_size_mb=self._mebibytes("weight_bytes"),
            power_watts=self.values.get("power_w"),
            energy_j=self.values.get("energy_j"),
            host_peak_mb=self._mebibytes("host_peak_bytes"),
            latency_ms_ci=interval_ms(latency),
            throughput_of=throughput_of,
            latencies_s=self.samples["latency_s"],
            reasons=self._reasons(latency),
        )

    def _mebibytes(self, name: str) -> float | None:
        value = self.values.get(name)
        return None if value is None else value / MEBIBYTE

    def _reasons(self, latency: MetricSummary) -> dict[str, str]:
        """Why figures of memory, energy and latency are missing, by the fields of a BenchmarkResult."""
        fields = {"vram_peak_mb": "peak_bytes", "power_watts": "power_w", "energy_j": "energy_j"}
        known = {field: self.reasons[name] for field, name in fields.items() if name in self.reasons}
        if known.get("vram_peak_mb") == KINDS[DeviceKind.CPU].lacks[Ability.MEMORY_PEAKS]:
            known["vram_peak_mb"] = NO_VRAM
        missing = [f"latency_ms_{name}" for name in ("p50", "p95", "p99") if getattr(latency, name) is None]
        return known | dict.fromkeys(missing, latency.reason or "Percentiles need more runs.")


def timed(
    runtime: Runtime,
    request: Request,
    workload: Workload,
    *,
    seconds: float = 0.0,
    least: int,
    energy: bool,
) -> Timed:
    """At least `least` requests and until `seconds` are over, then one for memory, and with `energy` those for it."""
    samples = run_round(request, seconds, least).samples
    values: dict[str, float] = {}
    reasons = {} if energy else dict.fromkeys(("energy_j", "power_w"), NOT_ASKED)
    with TemporaryDirectory() as folder:
        context = MeterContext(
            runtime=runtime,
            request=request,
            workload=workload,
            model=None,
            folder=Path(folder),
            seed=runtime.seed,
            quality=QualityOptions(),
        )
        for meter in ("memory", *(["energy"] if energy else [])):
            reading = METERS[meter].read(context)
            values |= reading.values
            reasons |= reading.reasons
    return Timed(samples, values, reasons)


def device_of(name: str) -> DeviceKind:
    """A kind of device by its name, also as `cuda:0`. Raises SpecError for any other, which lists them."""
    kind = name.partition(":")[0]
    if kind not in set(DeviceKind):
        raise SpecError(f"There is no device {name!r}; the devices are {', '.join(DeviceKind)}.")
    return DeviceKind(kind)


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def interval_ms(summary: MetricSummary) -> tuple[float, float] | None:
    return (summary.ci[0] * 1e3, summary.ci[1] * 1e3) if summary.ci else None
