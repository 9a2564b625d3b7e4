"""Requests timed in the caller's own process, by the clock, the rounds and the meters of a measuring process."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from optigpu.backends.runtime import Runtime
from optigpu.documents.result import Measurement, MetricSummary
from optigpu.facade.benchmark_result import MEBIBYTE
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.latency import run_round
from optigpu.statistics.intervals import summarise
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, SpecError
from optigpu.workloads.base import Request, Workload

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        read = {name: (value,) for name, value in self.values.items()}
        measured = {
            name: Measurement(name=name, samples=(tuple(samples),))
            for name, samples in {**self.samples, **read}.items()
        }
        missing = {name: Measurement(name=name, reason=why) for name, why in self.reasons.items()}
        return {name: summarise(each) for name, each in (missing | measured).items()}

    def mebibytes(self, name: str) -> float | None:
        """A metric of bytes in MB of 2**20; None if it was not read."""
        value = self.values.get(name)
        return None if value is None else value / MEBIBYTE


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
    with ExitStack() as stack:
        context = MeterContext(
            runtime=runtime,
            request=request,
            workload=workload,
            model=None,
            folder=Path(stack.enter_context(TemporaryDirectory())),
            seed=runtime.seed,
            quality=QualityOptions(),
        )
        for meter in ("memory", *(["energy"] if energy else [])):
            reading = METERS[meter].read(context)
            values |= reading.values
            reasons |= reading.reasons
    return Timed(samples, values, reasons)


def latency_reasons(summary: MetricSummary) -> dict[str, str]:
    """Why the percentiles of a summary are missing, by the fields of a BenchmarkResult."""
    missing = [f"latency_ms_{name}" for name in ("p50", "p95", "p99") if getattr(summary, name) is None]
    return dict.fromkeys(missing, summary.reason or "Percentiles need more runs.")


def memory_reasons(found: Timed) -> dict[str, str]:
    """Why a figure of memory or energy is missing, by the fields of a BenchmarkResult."""
    fields = {"vram_peak_mb": "peak_bytes", "power_watts": "power_w", "energy_j": "energy_j"}
    known = {field: found.reasons[name] for field, name in fields.items() if name in found.reasons}
    on_cpu = known.get("vram_peak_mb") == KINDS[DeviceKind.CPU].lacks[Ability.MEMORY_PEAKS]
    return known | ({"vram_peak_mb": NO_VRAM} if on_cpu else {})


def device_of(name: str) -> DeviceKind:
    """A kind of device by its name, also as `cuda:0`. Raises SpecError for any other, which lists them."""
    kind = name.partition(":")[0]
    if kind not in set(DeviceKind):
        raise SpecError(f"There is no device {name!r}; the devices are {', '.join(DeviceKind)}.")
    return DeviceKind(kind)


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def interval_ms(summary: MetricSummary) -> tuple[float, float] | None:
    """The summary's interval, of seconds, in milliseconds."""
    return (summary.ci[0] * 1e3, summary.ci[1] * 1e3) if summary.ci else None


class Origin(NamedTuple):
    """The reference that was loaded, the techniques that changed it, and the number of its weights before they did."""

    reference: str
    stack: tuple[Technique, ...]
    weights: int


_ORIGINS: "WeakKeyDictionary[PreTrainedModel, Origin]" = WeakKeyDictionary()


def remember(model: "PreTrainedModel", origin: Origin) -> None:
    """Notes the origin of a model that was loaded just now."""
    _ORIGINS[model] = origin


def origin_of(model: "PreTrainedModel") -> Origin | None:
    """The origin of a model; None for one that the facade has not loaded."""
    return _ORIGINS.get(model)
