"""The torch backend: transformers models on PyTorch.

Only `start`, `prepare`, `peaks` and `use_threads` import torch.
"""

import gc
import os
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

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
        """Everything."""
        return None

    def start(self, *, model: bool) -> None:
        """torch alone for operators, transformers too for models: most of a process's first seconds.

        What is imported stays, and a collector would look through all of it again and again.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            import_module(f"{__name__}.{'prepare' if model else 'operators'}")
        finally:
            if collects:
                gc.enable()

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Loads the model for the workload's task and applies the stack; without a model, the bare device."""
        self.start(model=order.model is not None)
        if order.model is None:
            from optigpu.backends.torch.operators import TorchOperatorRuntime  # loads no transformers

            return TorchOperatorRuntime(order.device, order.seed)
        from optigpu.backends.torch.prepare import prepare

        return prepare(order, order.model, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """Less than ten seconds of reading, copying and multiplying."""
        from optigpu.backends.torch.peak_rates import measured_peaks

        return measured_peaks(device, threads)

    def use_threads(self, count: int) -> None:
        """Sets the size of torch's thread pool. OpenMP reads the variable when torch is loaded.

        OpenMP's wait policy stays at its default: GNU's threads spin for some milliseconds after a parallel region,
        which bridges the gap to the next one, and sleep after that, so that a child that waits for a command holds no
        core.
        """
        os.environ["OMP_NUM_THREADS"] = str(count)
        import torch

        torch.set_num_threads(count)

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch has an error class for the allocators of CUDA and XPU, and only texts for all other memory."""
        text = str(error)
        return type(error).__name__ == "OutOfMemoryError" or any(words in text for words in _OUT_OF_MEMORY)
