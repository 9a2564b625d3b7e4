"""What a meter finds before it: a tiny model with a request, one of the test's own, or a trained model in a stack."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.hardware.sensors import Ticker
from optigpu.meters.base import MeterContext, QualityOptions, Reading
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.techniques.base import Loop, Notes, Phase, Step, Technique
from optigpu.vocabulary import DeviceKind, Layer
from optigpu.workloads.base import Request, Workload
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul
from tests.engine.tiny_models import asked, runtime_of


@dataclass
class Doing:
    """A request that does what the test says, and counts how often."""

    work: Callable[[], object]
    runs: int = 0

    def run(self) -> Mapping[str, float]:
        self.runs += 1
        self.work()
        return {}


def generating(folder: Path, *stack: Technique, new_tokens: int = 4, batch_size: int = 1) -> MeterContext:
    """A tiny Llama with random weights that generates."""
    model = "preset:tiny-llama-test"
    workload = Generate(prompt_tokens=8, new_tokens=new_tokens, batch_size=batch_size)
    runtime = asked(runtime_of(model, *stack), folder)
    return MeterContext(
        runtime, workload.prepare(runtime), workload, model, folder, seed=0, quality=QualityOptions()
    )


def multiplying(folder: Path, size: int = 64) -> MeterContext:
    """A matrix product."""
    runtime, workload = TorchOperatorRuntime(DeviceKind.CPU, seed=0), Matmul(sizes=(size,))
    return MeterContext(
        runtime, workload.prepare(runtime), workload, None, folder, seed=0, quality=QualityOptions()
    )


def doing(
    folder: Path, work: Callable[[], object], workload: Workload | None = None
) -> tuple[MeterContext, Doing]:
    """A request of the test's own on a CPU, under the name of a workload."""
    request = Doing(work)
    context = MeterContext(
        runtime=TorchOperatorRuntime(DeviceKind.CPU, seed=0),
        request=cast(Request, request),
        workload=workload or Matmul(sizes=(8,)),
        model=None,
        folder=folder,
        seed=0,
        quality=QualityOptions(),
    )
    return context, request


def fail() -> None:
    """What a request does that breaks down."""
    raise ZeroDivisionError("the request broke down")


def tickers() -> int:
    """Threads of a Ticker that are still there."""
    return sum(thread.name == Ticker.THREAD for thread in threading.enumerate())


MODEL = "path:trained"
VOCABULARY = 320
WORKLOAD = Generate(prompt_tokens=24, new_tokens=40, batch_size=2)
LENGTH = 64


class Flattened(Technique):
    """Halves the logits of each decoded token: the same best token, another distribution."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    name: Literal["flattened"] = "flattened"

    def step(self, step: Step, notes: Notes) -> Step:
        def halved(tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
            found, logits = step(tokens, position, cache)
            return found, logits / 2

        return halved


class Spoiled(Technique):
    """Adds noise to every weight."""

    layer: ClassVar[Layer] = Layer.QUANTIZATION
    phase: ClassVar[Phase] = Phase.QUANTIZATION
    name: Literal["spoiled"] = "spoiled"
    noise: float

    def modules(self, model: Any, notes: Notes) -> None:
        torch.manual_seed(3)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * self.noise * weight.std())


class Broken(Flattened):
    """Gives no numbers."""

    name: Literal["broken"] = "broken"  # type: ignore[assignment]

    def step(self, step: Step, notes: Notes) -> Step:
        return lambda tokens, position, cache: (tokens, step(tokens, position, cache)[1] * math.nan)


class Spy(Technique):
    """Notes the positions and the cache of each decode step."""

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.COMPILATION
    name: Literal["spy"] = "spy"

    def step(self, step: Step, notes: Notes) -> Step:
        def seen(tokens: Any, position: Any, cache: Any) -> tuple[Any, Any]:
            known = notes.facts.get("seen", [])
            notes.record(seen=[*known, (tokens.flatten().tolist(), int(position), id(cache))])
            return step(tokens, position, cache)

        return seen


class OwnLoop(Technique):
    """Replaces the decode loop by one that is a function, or one that gives logits."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.CACHE
    name: Literal["own_loop"] = "own_loop"
    scores: bool

    def loop(self, loop: Loop, model: Any, notes: Notes) -> Loop:
        return ScoringLoop(loop) if self.scores else lambda *arguments: loop(*arguments)


class ScoringLoop:
    """A loop that finds all tokens equally likely."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __call__(self, prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
        return self._loop(prompt, new_tokens, clock)

    def score(self, tokens: Any, prefill: int) -> Iterator[Any]:
        for _ in range(prefill, tokens.shape[1]):
            yield torch.zeros(tokens.shape[0], VOCABULARY)


def context_of(
    applied: DecodingModel,
    folder: Path,
    workload: Generate = WORKLOAD,
    model: str = MODEL,
    **options: Any,
) -> MeterContext:
    """A meter's context in which one request was run already."""
    runtime = asked(applied, folder)
    request = workload.prepare(runtime)
    request.run()
    return MeterContext(runtime, request, workload, model, folder, 0, QualityOptions(**options))


def context(folder: Path, *stack: Technique, **options: Any) -> MeterContext:
    """The trained model with that stack, and the usual workload."""
    return context_of(runtime_of(MODEL, *stack), folder, **options)


def measured(folder: Path, *stack: Technique, **options: Any) -> Reading:
    """A reference, and a variant with that stack compared with it."""
    assert make_reference(context(folder, **options)).reasons == {}
    return QualityMeter().read(context(folder, *stack, **options))


def exact_model() -> Any:
    """The plain model in float64."""
    return runtime_of(MODEL).model.double()


def assert_nothing(reading: Reading, why: str) -> None:
    """No value at all, and one sentence for every metric."""
    assert reading.values == {}
    assert set(reading.reasons) == set(QualityMeter.metrics)
    (reason,) = set(reading.reasons.values())
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(reason)
    assert reason.endswith(".")
