"""What runs with the same arguments again and again, recorded as a CUDA graph."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Cache

from optigpu.surgery.compile_times import MadeFor, cache_tensors, is_filled, made_for, require_same
from optigpu.techniques.base import Notes
from optigpu.vocabulary import unsupported

WARM_UPS = 3
"""Runs before the recording: libraries choose their kernels and allocate their workspaces in the first ones."""

Recorder = Callable[[Callable[[], Any], Callable[[], None]], tuple[Callable[[], None], Any]]
"""`replay, outputs = record(run, undo)`: records what `run` does without doing it; each replay writes `outputs` anew.

`undo` takes back what a call of `run` before the recording did.
"""


class Replayed:
    """Records at its first call; later calls need arguments of the same shapes.

    The tensors among the arguments are inputs, copied to where the recording reads them; a cache is written where it
    stands. A call returns what the recording writes: the next call overwrites it.
    """

    def __init__(self, run: Callable[..., Any], notes: Notes, record: Recorder) -> None:
        self._run = run
        self._notes = notes
        self._record = record
        self._made_for: MadeFor | None = None
        self._inputs: list[torch.Tensor] = []
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None

    def __call__(self, *arguments: Any) -> Any:
        *inputs, cache = arguments if len(arguments) > 1 else (*arguments, None)
        if cache is not None and not is_filled(cache):
            return self._run(*arguments)  # allocates the cache's tensors, which the recording needs
        if self._made_for is None or self._replay is None:
            self._replay = self._recorded(inputs, cache)
            self._made_for = made_for(*arguments)
        require_same("cuda_graphs", self._made_for, *arguments)
        for held, argument in zip(self._inputs, inputs, strict=True):
            held.copy_(argument)
        self._replay()
        return self._outputs

    def _recorded(self, inputs: list[torch.Tensor], cache: Cache | None) -> Callable[[], None]:
        started = time.perf_counter()
        self._inputs = [argument.clone() for argument in inputs]
        kept = [(tensor, tensor.clone()) for tensor in (cache_tensors(cache) if cache is not None else ())]

        def run() -> Any:
            return self._run(*self._inputs, *(() if cache is None else (cache,)))

        def undo() -> None:
            for tensor, before in kept:
                tensor.copy_(before)

        replay, self._outputs = self._record(run, undo)
        self._notes.record(cuda_graphs=1, cuda_graph_record_s=time.perf_counter() - started)
        return replay


def record_cuda_graph(run: Callable[[], Any], undo: Callable[[], None]) -> tuple[Callable[[], None], Any]:
    """Warms up on a separate stream, as recording wants it, and records.

    Raises UnsupportedError where an operation cannot be recorded: it waits for the device, or reads the host's memory.
    Source: PyTorch documentation, CUDA semantics: CUDA Graphs.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with _without_autocast_cache():
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                run()
                undo()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        sentence = "cuda_graphs cannot record this model ({}); leave it out of the stack."
        with unsupported(RuntimeError, sentence.format), torch.cuda.graph(graph):
            outputs = run()
    torch.cuda.synchronize()
    return graph.replay, outputs


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Turns autocast's cache off: weights converted earlier would be missing in the recording, and freed at its
    replay."""
    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
