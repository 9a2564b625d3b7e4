"""A decode step that is launched, or recorded once as a CUDA graph and replayed.

Imported only where a GPU is used, because it loads Triton.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from optigpu.ops.decode.cuda.step_memory import StepMemory
from optigpu.ops.decode.program import CacheKind, Program
from optigpu.ops.launch import LaunchTarget


class RecordedStep(ABC):
    """Appends the tokens of `state` and chooses the next ones; `run` launches the kernels, or their recorded graph."""

    def __init__(self, program: Program, kv: CacheKind, sequences: int, capacity: int) -> None:
        self.sequences, self.capacity = sequences, capacity
        self._program = program
        self._target = LaunchTarget.of(program.device)
        self._memory = memory = StepMemory.of(program, kv, sequences, capacity, self._target)
        self.state, self.layers = memory.state, memory.layers
        self.rotary, self.logits = memory.rotary, memory.logits
        self.run: Callable[[], None] = self._launch

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and their steps."""
        tensors = [
            tensor
            for layer in self.layers
            for tensor in (layer.keys, layer.values, layer.key_steps, layer.value_steps)
            if tensor is not None
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def reset(self) -> None:
        """Empties the cache."""
        self.state.position.zero_()
        self.state.not_finite.zero_()

    def record(self) -> None:
        """From now on `run` replays a CUDA graph. The cache is empty after the launches that compile the kernels."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch()
        self.run = graph.replay
        self.reset()

    @abstractmethod
    def _launch(self) -> None: ...
