"""The vllm backend: vLLM's engine in the measuring process, without a server, in an environment of its own.

vLLM's build for CPUs and its build for CUDA are two packages; `optigpu engines install vllm` takes the one that fits
the machine. Only `start` and `prepare` import vLLM.
"""

import os
from typing import ClassVar

from optigpu.backends.engine import EngineBackend
from optigpu.vocabulary import DeviceKind


class VllmBackend(EngineBackend):
    """Decodes models that vLLM knows, from safetensors; the engine is made for the lengths of one workload."""

    name = "vllm"
    summary = "vLLM's engine without a server, with a cache in pages"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU, DeviceKind.CUDA)
    workloads = ("generate",)

    def use_threads(self, count: int) -> None:
        """vLLM reads the variables when it is loaded; it would bind its threads to cores that others may use."""
        os.environ["OMP_NUM_THREADS"] = str(count)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch's own error on a GPU, and what the allocator of a CPU says."""
        return type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
