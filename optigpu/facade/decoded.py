"""A loaded transformers model, decoded and timed in the caller's process as a measuring process does it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from optigpu.backends.runtime import Ids
from optigpu.documents.facts import NOT_RECORDED, RunFacts
from optigpu.documents.result import MetricSummary, Result, Verdict, VerdictWarning
from optigpu.documents.shapes import ModelFacts
from optigpu.facade.benchmark_result import BenchmarkResult
from optigpu.facade.in_process import milliseconds, timed
from optigpu.hardware import probe
from optigpu.job.measured import summary_of
from optigpu.job.spec import Variant
from optigpu.meters.latency import warm_up
from optigpu.roofline.work import work_of
from optigpu.techniques.base import Technique
from optigpu.vocabulary import OptiGPUError, Role, SpecError, UnsupportedError, new_id, utc_now
from optigpu.workloads.generate import Generate
from optigpu.workloads.requests.decoding import DecodingRequest, drawn_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
        warm_up(request, check.request_s)
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
