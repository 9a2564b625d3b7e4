"""The onnxruntime backend: ONNX graphs in ONNX Runtime's CPU provider, text as well as images.

Without a technique a variant is the baseline: weights, keys and values in float32, the graph rewritten as far as the
engine can. Only `start` and `prepare` import ONNX Runtime.
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

PACKAGES = ("onnxruntime", "onnx")
INSTALL = 'pip install -e ".[onnxruntime]"'
WORKLOADS = ("generate", "prefill", "quality", "classify")


class OnnxRuntimeBackend:
    """Decodes and classifies on a CPU."""

    name: ClassVar[str] = "onnxruntime"
    summary: ClassVar[str] = "decoders and image classifiers as ONNX graphs in ONNX Runtime, on a CPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """The packages of the extra `onnxruntime` that are not installed."""
        return packages_missing(PACKAGES, environment, INSTALL)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation, prompts, the scoring of text, and classification of random images."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports ONNX Runtime."""
        import_module(f"{__name__}.prepare")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the model's graph if it is not kept already, and loads it."""
        from optigpu.backends.onnxruntime.prepare import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """A graph of one operator would be needed for each figure."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """Nothing: a session is told its threads when it is made."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """ONNX Runtime says it in the text of errors of its own."""
        return allocation_failed(error)
