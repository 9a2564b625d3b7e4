"""Requests timed in the caller's own process, by the clock, the rounds and the meters of a measuring process; and a
loaded transformers model, decoded so."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from optigpu.backends.runtime import Ids, Runtime
from optigpu.documents.facts import NOT_RECORDED, ModelFacts, RunFacts
from optigpu.documents.result import Measurement, MetricSummary, Result, Verdict, VerdictWarning
from optigpu.facade.benchmark_result import MEBIBYTE, BenchmarkResult
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.job.measured import summary_of
from optigpu.job.spec import Variant
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.latency import run_round, warm_up
from optigpu.roofline.work import work_of
from optigpu.statistics.intervals import summarise
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, OptiGPUError, Role, SpecError, UnsupportedError, new_id, utc_now
from optigpu.workloads.base import Request, Workload
from optigpu.workloads.generate import Generate
from optigpu.workloads.requests import DecodingRequest, drawn_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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


IN_PROCESS = "Measured by one process, the caller's own, which no other process watched."
RANDOM_PROMPT = "The prompt was random: the model came without a tokenizer."
FEWEST = 3
"""Requests, however long they take."""


class Origin(NamedTuple):
    """The reference that was loaded, the techniques that changed it, and the number of its weights before they did."""

    reference: str | None
    stack: tuple[Technique, ...]
    weights: int | None


ORIGINS: "WeakKeyDictionary[PreTrainedModel, Origin]" = WeakKeyDictionary()
"""Of the models that QuantizationOptimizer has loaded."""


@dataclass(frozen=True)
class Decoded:
    """What was measured, as people print it and as the document that charts and claims read."""

    benchmark: BenchmarkResult
    result: Result


def decode(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    text: str,
    label: str,
    index: int,
    *,
    new_tokens: int,
    seconds: float,
    energy: bool,
) -> Decoded:
    """Checks the model's output, warms it up and times it. Raises SpecError for a prompt without a token or beyond the
    model's context, OptiGPUError for output that is NaN or infinite."""
    from optigpu.backends.torch.applied import DecodingModel
    from optigpu.backends.torch.device import kind_of
    from optigpu.backends.torch.runtime import TorchDecodingRuntime

    device = kind_of(model.device)
    with _plain_greedy(model), TemporaryDirectory() as folder:
        runtime = TorchDecodingRuntime(DecodingModel(model, (), device, 0, lambda _: None), Path(folder))
        prompt = _prompt_ids(tokenizer, text, runtime.facts)
        if new_tokens < 2:
            raise SpecError("new_tokens must be at least 2: the first token is the prompt's.")
        workload = Generate(prompt_tokens=prompt.shape[1], new_tokens=new_tokens)
        if problem := workload.check(runtime.facts):
            raise SpecError(problem)
        request = DecodingRequest(runtime, prompt.shape, new_tokens, prompt=prompt)
        check = request.check()
        if check.problem:
            raise OptiGPUError(check.problem)
        warm_up(request, (check.request_s,))
        found = timed(runtime, request, workload, seconds=seconds, least=FEWEST, energy=energy)
        noted = runtime.notes.facts | check.details
        noted |= {"weights": runtime.weights(), "footprint": runtime.footprint()}
    origin = ORIGINS.get(model) or Origin(None, (), None)
    variant = Variant(
        index=index,
        role=Role.SINGLE,
        label=label,
        workload=workload,
        model=origin.reference,
        device=device,
        stack=origin.stack,
    )
    summaries, facts = found.summaries(), RunFacts.gathered(noted, NOT_RECORDED)
    benchmark = found.benchmark(label, "tokens")
    benchmark = replace(
        benchmark,
        throughput_per_sec=summaries["tokens_per_s"].value,
        first_token_ms=milliseconds(summaries["ttft_s"].value),
        params_total=benchmark.params_total if origin.weights is None else origin.weights,
        params_trainable=sum(each.numel() for each in model.parameters() if each.requires_grad),
        flops_total=_flops(workload, facts),
        notes=() if tokenizer else (RANDOM_PROMPT,),
    )
    return Decoded(benchmark, _result(variant, summaries, facts))


def _result(variant: Variant, summaries: dict[str, MetricSummary], facts: RunFacts) -> Result:
    """It says of itself where it was measured; nobody keeps or ranks it."""
    return Result(
        id=new_id(),
        source="in_process",
        created_at=utc_now(),
        variant=summary_of(variant),
        verdict=Verdict(valid=True, warnings=(VerdictWarning.SINGLE_REPLICATE,), notes=(IN_PROCESS,)),
        metrics=summaries,
        facts=facts,
        environment=probe(),
        seed=0,
    )


@contextmanager
def _plain_greedy(model: "PreTrainedModel") -> Iterator[None]:
    """The model in evaluation mode, without its own decoding settings: an end token would end a request early."""
    from transformers import GenerationConfig

    settings, training = model.generation_config, model.training
    model.generation_config = GenerationConfig(do_sample=False)
    model.eval()
    try:
        yield
    finally:
        model.generation_config = settings
        model.train(training)


def _prompt_ids(tokenizer: "PreTrainedTokenizerBase | None", prompt: str, facts: ModelFacts) -> Ids:
    """Ids [1, length]; without a tokenizer as many random ones as the prompt has words."""
    if not prompt.strip():
        raise SpecError("The prompt is empty; write a few words.")
    if tokenizer is None:
        return drawn_ids(np.random.default_rng(0), facts, (1, len(prompt.split())))
    ids = np.asarray([tokenizer.encode(prompt)], dtype=np.int64)
    if not ids.size or ids.max() >= facts.vocabulary:
        raise SpecError(
            f"The tokenizer does not fit the model, whose token ids are 0 to {facts.vocabulary - 1}; load both from "
            "one place."
        )
    return ids


def _flops(workload: Generate, facts: RunFacts) -> float | None:
    """Of the prompt and of every step, by the architecture's shapes; None for a family whose blocks are not known."""
    try:
        work = work_of(workload, facts)
    except UnsupportedError:
        return None
    prefill = work.prefill.flops if work.prefill else 0.0
    return prefill + (workload.new_tokens - 1) * work.step.flops
