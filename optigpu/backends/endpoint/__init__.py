"""The endpoint backend: a server that speaks OpenAI's completions, by its address.

vLLM, SGLang, TGI, TensorRT-LLM, Ollama, llama-server and `transformers serve` are such servers. The server has the
model; this process asks it, and times what comes.
"""

from typing import ClassVar

from optigpu.backends.engine import EngineBackend
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

    def is_out_of_memory(self, error: Exception) -> bool:
        """No: memory that runs out is the server's, which answers with an error."""
        return False
