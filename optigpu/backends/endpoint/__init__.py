"""The endpoint backend: a server that speaks OpenAI's completions, by its address.

vLLM, SGLang, TGI, TensorRT-LLM, Ollama, llama-server and `transformers serve` are such servers. The server has the
model; this process asks it, and times what comes.
"""

from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.refusals import no_operators, workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.endpoints import ENDPOINT
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

WORKLOADS = ("generate", "serve")


class EndpointBackend:
    """Asks a server for completions. `device` is what the server computes on, as the job says."""

    name: ClassVar[str] = ENDPOINT
    summary: ClassVar[str] = "a server that speaks OpenAI's completions, by its address"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU, DeviceKind.CUDA)

    def missing(self, environment: Environment) -> str | None:
        """Nothing: what asks a server is always installed."""
        return None

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation: a server gives no logits for a given text."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports what asks a server."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Finds out what the server takes; it has loaded its model already, or loads it with the first question."""
        from optigpu.backends.endpoint.runtime import prepared

        return prepared(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """A server offers no operators."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """The server was started with threads of its own."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Memory that runs out is the server's, which answers with an error."""
        return False
