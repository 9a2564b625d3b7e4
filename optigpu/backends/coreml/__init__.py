"""The coreml backend: models as Core ML packages, on a Mac.

It has never run on a machine of this project: `optigpu selftest` checks it where it is installed. Only `start` and
`prepare` import it.
"""

import platform
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.refusals import allocation_failed, no_operators, packages_missing, workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

PACKAGE = "coremltools"
INSTALL = 'pip install -e ".[coreml]"'
SYSTEM = "Darwin"
WORKLOADS = ("generate", "quality")


class CoreMlBackend:
    """Runs passes over whole sequences: the package has no cache, and says so in the facts."""

    name: ClassVar[str] = "coreml"
    summary: ClassVar[str] = "Core ML packages without a cache, on a Mac"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """A Mac, or the package."""
        if platform.system() != SYSTEM:
            return f"coreml runs on macOS alone, and this is {platform.system()}; ask a worker on a Mac."
        return packages_missing((PACKAGE,), environment, INSTALL)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation and the scoring of text."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports Core ML."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the package if it is not kept already, and loads it."""
        from optigpu.backends.coreml.runtime import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """It offers no operators of its own to measure with."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """Core ML decides for itself."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """It has no error of its own for that."""
        return allocation_failed(error)
