"""The tensorrt_llm backend: NVIDIA's TensorRT-LLM through its LLM class, on a GPU.

It has never run on a machine of this project: `optigpu selftest --device cuda` checks it where it is installed. Only
`start` and `prepare` import it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.refusals import no_operators, packages_missing, workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

PACKAGE = "tensorrt-llm"
INSTALL = f"pip install {PACKAGE} --extra-index-url https://pypi.nvidia.com"
WORKLOADS = ("generate",)


class TensorRtLlmBackend:
    """Decodes models that TensorRT-LLM knows, from safetensors."""

    name: ClassVar[str] = "tensorrt_llm"
    summary: ClassVar[str] = "NVIDIA's TensorRT-LLM, on a GPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CUDA,)

    def missing(self, environment: Environment) -> str | None:
        """A GPU, or the package."""
        if not environment.has(DeviceKind.CUDA):
            return "tensorrt_llm needs an NVIDIA GPU, and this machine has none that works; ask a worker that has one."
        return packages_missing((PACKAGE,), environment, INSTALL)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation: the engine is made for the lengths of one workload."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports TensorRT-LLM."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Makes the engine."""
        from optigpu.backends.tensorrt_llm.runtime import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """It offers no operators of its own to measure with."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """It computes on the GPU."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch's own error, and what the executor says."""
        return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()
