"""The endpoint backend: a server that speaks OpenAI's completions, by its address.

vLLM, SGLang, TGI, TensorRT-LLM, Ollama, llama-server and `transformers serve` are such servers. The server has the
model; this process asks it, and times what comes.
"""

from collections.abc import Callable
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineBackend
from optigpu.backends.runtime import Runtime
from optigpu.documents.endpoints import ENDPOINT
from optigpu.vocabulary import DeviceKind


class EndpointBackend(EngineBackend):
    """Asks a server for completions. `device` is what the server computes on, as the job says.

    Nothing need be installed. The server was started with threads and memory of its own.
    """

    name = ENDPOINT
    summary = "a server that speaks OpenAI's completions, by its address"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU, DeviceKind.CUDA)
    workloads = ("generate", "serve")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Finds out what the server takes; it has loaded its model already, or loads it with the first question."""
        from optigpu.backends.endpoint.runtime import prepared

        return prepared(order, progress)

    def is_out_of_memory(self, error: Exception) -> bool:
        """No: memory that runs out is the server's, which answers with an error."""
        return False
