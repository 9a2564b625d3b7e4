"""The coreml backend: models as Core ML packages, on a Mac.

It has never run on a machine of this project: `optigpu selftest` checks it where it is installed. Only `start` and
`prepare` import it.
"""

import platform
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.base import Workload

PACKAGE = "coremltools"
SYSTEM = "Darwin"
WORKLOADS = ("generate", "quality")
REFUSED = (
    "coreml takes the most likely tokens after random ones here; leave prompt, temperature and top_p out, or ask for "
    "the backend torch."
)


class CoreMlBackend:
    """Runs passes over whole sequences: the package has no cache, and says so in the facts."""

    name: ClassVar[str] = "coreml"
    summary: ClassVar[str] = "Core ML packages without a cache, on a Mac"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """A Mac, or the package."""
        if platform.system() != SYSTEM:
            return f"coreml runs on macOS alone, and this is {platform.system()}; ask a worker on a Mac."
        if PACKAGE not in environment.software:
            return "coremltools is not installed; install it with: pip install coremltools"
        return None

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation and the scoring of text."""
        if workload.kind in WORKLOADS:
            return REFUSED if workload.is_sampled or workload.has_text else None
        return f"coreml does not run the workload {workload.kind}; it runs {', '.join(WORKLOADS)}."

    def start(self, *, model: bool) -> None:
        """Imports Core ML."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the package if it is not kept already, and loads it."""
        from optigpu.backends.coreml.runtime import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """It offers no operators of its own to measure with."""
        raise UnsupportedError("Core ML has no operators that the machine's peaks could be measured with.")

    def use_threads(self, count: int) -> None:
        """Core ML decides for itself."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """It has no error of its own for that."""
        return isinstance(error, MemoryError)
