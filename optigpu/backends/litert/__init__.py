"""The litert backend: .tflite files in LiteRT with XNNPACK's operators, through the package ai-edge-litert.

It runs the file that microcontrollers run, so that a host stands beside them. Only `start` and `prepare` import LiteRT;
nothing here needs TensorFlow.
"""

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

PACKAGE = "ai-edge-litert"
INSTALL = f"pip install {PACKAGE}"
WORKLOADS = ("classify",)


class LiteRtBackend:
    """Classifies images on a CPU. The file is as it was converted, so no technique applies to it."""

    name: ClassVar[str] = "litert"
    summary: ClassVar[str] = "image classifiers as .tflite files in LiteRT with XNNPACK, on a CPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """LiteRT, if it is not installed."""
        return packages_missing((PACKAGE,), environment, INSTALL)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Classification of images."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports LiteRT."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Loads the file that the reference names."""
        from optigpu.backends.litert.runtime import LiteRtRuntime

        return LiteRtRuntime(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """LiteRT offers no operators of its own to measure with."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """Nothing: an interpreter is told its threads when it is made."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """LiteRT says nothing of its own when memory runs out."""
        return allocation_failed(error)
