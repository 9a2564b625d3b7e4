"""What a meter finds before it: a tiny model with a request, or a request of the test's own."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.hardware.sensors import Ticker
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
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
