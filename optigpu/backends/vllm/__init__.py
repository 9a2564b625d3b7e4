"""The vllm backend: vLLM's engine in the measuring process, without a server, in an environment of its own.

vLLM's build for CPUs and its build for CUDA are two packages; `optigpu engines install vllm` takes the one that fits
the machine. Only `start` and `prepare` import vLLM.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.refusals import workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.engines.environments import not_installed
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.base import Workload

WORKLOADS = ("generate",)


class VllmBackend:
    """Decodes models that vLLM knows, from safetensors."""

    name: ClassVar[str] = "vllm"
    summary: ClassVar[str] = "vLLM's engine without a server, with a cache in pages"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU, DeviceKind.CUDA)

    def missing(self, environment: Environment) -> str | None:
        """That the environment of the engine is not there."""
        return not_installed(self.name)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation: the engine is made for the lengths of one workload."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports vLLM."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes a preset's folder if it is not kept already, and makes the engine."""
        from optigpu.backends.vllm.runtime import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """vLLM's operators belong to torch, which measures the machine's peaks itself."""
        raise UnsupportedError("vLLM's peaks are those of torch; ask the backend torch for them.")

    def use_threads(self, count: int) -> None:
        """vLLM reads the variables when it is loaded; it would bind its threads to cores that others may use."""
        os.environ["OMP_NUM_THREADS"] = str(count)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch's own error on a GPU, and what the allocator of a CPU says."""
        return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
