"""The torch backend: transformers models on PyTorch; and the options of a resolved stack, in the order of the phases.

Only `start`, `prepare`, `peaks` and `use_threads` import torch.
"""

import gc
import os
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import CacheOptions, LoadOptions, ModeOptions, Technique
from optigpu.vocabulary import DeviceKind, Task
from optigpu.workloads.base import Workload


def load_options(stack: tuple[Technique, ...]) -> LoadOptions:
    return reduce(lambda options, technique: technique.load(options), stack, LoadOptions())


def cache_options(stack: tuple[Technique, ...]) -> CacheOptions:
    return reduce(lambda options, technique: technique.cache(options), stack, CacheOptions())


def mode_options(stack: tuple[Technique, ...]) -> ModeOptions:
    return reduce(lambda options, technique: technique.execution(options), stack, ModeOptions())


def overriding(stack: tuple[Technique, ...], *hooks: str) -> list[str]:
    """The names of the techniques that override one of these hooks."""
    return [technique.name for technique in stack if any(map(technique.overrides, hooks))]


_OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator")
"""Texts of torch's errors when the memory of a GPU or of the host runs out."""


class TorchBackend:
    """Runs every workload and every technique that does not name other backends alone."""

    name: ClassVar[str] = "torch"
    summary: ClassVar[str] = "transformers models on PyTorch"
    devices: ClassVar[tuple[DeviceKind, ...]] = tuple(DeviceKind)

    def missing(self, environment: Environment) -> str | None:
        """Nothing: torch is a dependency of the package; `prepare` says when its build has no CUDA."""
        return None

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        return None

    def start(self, *, model: bool) -> None:
        """torch alone for operators, transformers too for models. What is imported stays: no collector looks at it."""
        collects = gc.isenabled()
        gc.disable()
        try:
            import_module(f"{__name__}.{'runtime' if model else 'operators'}")
        finally:
            if collects:
                gc.enable()

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """The model, loaded for the workload's task, with the stack applied; without a model, the bare device.

        Raises UnsupportedError when this machine or this model cannot do it.
        """
        self.start(model=order.model is not None)
        if order.model is None:
            from optigpu.backends.torch.operators import TorchOperatorRuntime  # loads no transformers

            return TorchOperatorRuntime(order.device, order.seed)
        from optigpu.backends.torch.applied import DecodingModel, PassModel
        from optigpu.backends.torch.runtime import (
            TorchDecodingRuntime,
            TorchPassRuntime,
            TorchTrainingRuntime,
        )
        from optigpu.backends.torch.training_step import TrainableModel

        task, rule = order.workload.task, order.workload.update_rule
        given = (order.model, order.stack, order.device, order.seed, progress)
        if task is Task.DECODING:
            return TorchDecodingRuntime(DecodingModel(*given), order.folder)
        if rule is not None:
            return TorchTrainingRuntime(TrainableModel(rule, *given), order.folder)
        return TorchPassRuntime(PassModel(task, *given), order.folder)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """Less than ten seconds of reading, copying and multiplying."""
        from optigpu.backends.torch.peak_rates import measured_peaks

        return measured_peaks(device, threads)

    def use_threads(self, count: int) -> None:
        """Sets the size of torch's thread pool; OpenMP reads the variable when torch is loaded.

        OpenMP's wait policy stays at its default: threads spin for milliseconds after a parallel region, then sleep.
        """
        os.environ["OMP_NUM_THREADS"] = str(count)
        import torch

        torch.set_num_threads(count)

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch has an error class for the allocators of CUDA and XPU, and only texts for all other memory."""
        text = str(error)
        return type(error).__name__ == "OutOfMemoryError" or any(words in text for words in _OUT_OF_MEMORY)
