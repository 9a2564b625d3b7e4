"""The executorch backend: models as ExecuTorch programs, with the operators of XNNPACK, on a CPU.

The engine that runs on phones, here on the machine that converts for them, in an environment of its own. Only `start`
and `prepare` import it.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.refusals import allocation_failed, no_operators, workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.engines.environments import not_installed
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

WORKLOADS = ("generate", "quality")


class ExecuTorchBackend:
    """Decodes with a program that was exported for so many sequences and so many tokens."""

    name: ClassVar[str] = "executorch"
    summary: ClassVar[str] = "ExecuTorch programs with XNNPACK, on a CPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """That the environment of the engine is not there."""
        return not_installed(self.name)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation and the scoring of text."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports ExecuTorch."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Exports the program if it is not kept already, and loads it."""
        from optigpu.backends.executorch.runtime import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """It offers no operators of its own to measure with."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """For the libraries beside it; its own thread pool is told when the program is loaded."""
        os.environ["OMP_NUM_THREADS"] = str(count)

    def is_out_of_memory(self, error: Exception) -> bool:
        """The name of its error for an allocation that fails."""
        return allocation_failed(error)
