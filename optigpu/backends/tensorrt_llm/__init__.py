"""The tensorrt_llm backend: NVIDIA's TensorRT-LLM through its LLM class, on a GPU.

It has never run on a machine of this project: `optigpu selftest --device cuda` checks it where it is installed. Only
`start` and `prepare` import it.
"""

from typing import ClassVar

from optigpu.backends.engine import EngineBackend
from optigpu.documents.result import Environment
from optigpu.vocabulary import DeviceKind


class TensorRtLlmBackend(EngineBackend):
    """Decodes models that TensorRT-LLM knows, from safetensors; the engine is made for the lengths of one workload."""

    name = "tensorrt_llm"
    summary = "NVIDIA's TensorRT-LLM, on a GPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CUDA,)
    packages = ("tensorrt-llm",)
    install = "pip install tensorrt-llm"
    workloads = ("generate",)

    def missing(self, environment: Environment) -> str | None:
        """A GPU, or the package."""
        if not environment.has(DeviceKind.CUDA):
            return "tensorrt_llm needs an NVIDIA GPU, and this machine has none that works; ask a worker that has one."
        return super().missing(environment)

    def is_out_of_memory(self, error: Exception) -> bool:
        """torch's own error, and what the executor says."""
        return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()
