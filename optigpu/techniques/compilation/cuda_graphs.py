"""cuda_graphs: the decode step, or a whole forward pass, recorded once and replayed with one launch."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.surgery.step_arguments import MadeFor, cache_tensors, is_filled, made_for, require_same
from optigpu.techniques.base import ON_MODELS, Choice, Forward, Notes, Phase, Step, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task, UnsupportedError

WARM_UPS = 3
"""Runs before the recording: libraries choose their kernels and allocate their workspaces in the first ones."""

Recorder = Callable[[Callable[[], Any], Callable[[], None]], tuple[Callable[[], None], Any]]
"""`replay, outputs = record(run, undo)`: records what `run` does without doing it; each replay writes `outputs` anew.

`undo` takes back what a call of `run` before the recording did.
"""


class CudaGraphs(Technique):
    """Records the kernels of the decode step as a CUDA graph and decodes in a lean greedy loop around its replay.

    The recording has addresses and no values: tokens and position are copied to where it reads them, the static cache
    stays where it is, and outputs stand where the last ones stood. What torch_compile made can be recorded as well,
    unless its mode records graphs by itself.
    """

    layer: ClassVar[Layer] = Layer.COMPILATION
    phase: ClassVar[Phase] = Phase.CAPTURE
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = (
        "the decode step's kernels recorded as a CUDA graph and launched at once; without decoding, the forward pass's"
    )
    citation: ClassVar[str] = (
        "Nguyen et al., Accelerating PyTorch with CUDA Graphs, 2021, "
        "pytorch.org/blog/accelerating-pytorch-with-cuda-graphs"
    )
    expected: ClassVar[str] = (
        "2x and more at batch 1, where launching takes longer than the kernels; nothing when large"
    )
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CUDA,)
    requires: ClassVar[tuple[str, ...]] = ("static_kv_cache",)
    conflicts: ClassVar[Mapping[str, str]] = {
        "no_kv_cache": "a recorded decode step needs a cache that stays in place",
        "cpu_offload": "a recording knows addresses, and offloaded weights come to others each time",
        "grad_enabled": "a recording keeps no gradients",
    }
    choices: ClassVar[tuple[Choice, ...]] = (Choice.CAPTURE,)

    name: Literal["cuda_graphs"] = "cuda_graphs"

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """torch_compile with mode reduce-overhead records graphs too, and fuses before."""
        return False

    def step(self, step: Step, notes: Notes) -> Step:
        """The step as a graph."""
        return Replayed(step, notes, record_cuda_graph)

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        """The pass as a graph."""
        return Replayed(forward, notes, record_cuda_graph)


class Replayed:
    """Records at its first call, and takes such arguments alone from then on.

    The tensors among the arguments are inputs, copied to where the recording reads them; a cache is written where it
    stands. A call returns what the recording writes: the next call overwrites it.
    """

    def __init__(self, run: Callable[..., Any], notes: Notes, record: Recorder) -> None:
        self._run = run
        self._notes = notes
        self._record = record
        self._made_for: MadeFor | None = None
        self._inputs: list[Any] = []
        self._replay: Callable[[], None] | None = None
        self._outputs: Any = None

    def __call__(self, *arguments: Any) -> Any:
        *inputs, cache = arguments if len(arguments) > 1 else (*arguments, None)
        if cache is not None and not is_filled(cache):
            return self._run(*arguments)  # which makes the cache's tensors: then there is something to record
        if self._made_for is None or self._replay is None:
            self._replay = self._recorded(inputs, cache)
            self._made_for = made_for(*arguments)
        require_same("cuda_graphs", self._made_for, *arguments)
        for held, argument in zip(self._inputs, inputs, strict=True):
            held.copy_(argument)
        self._replay()
        return self._outputs

    def _recorded(self, inputs: list[Any], cache: Any) -> Callable[[], None]:
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
    """Warms up on a stream of its own, as recording wants it, and records.

    Raises UnsupportedError where an operation cannot be recorded: it waits for the device, or reads the host's memory.
    Source: PyTorch documentation, CUDA semantics: CUDA Graphs.
    """
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with _without_autocast_cache():
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                run()
                undo()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                outputs = run()
        except RuntimeError as error:
            why = str(error).strip().splitlines()[0].rstrip(".")
            raise UnsupportedError(f"cuda_graphs cannot record this model ({why}); leave it out.") from error
    torch.cuda.synchronize()
    return graph.replay, outputs


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Weights that autocast converted before would be missing in the recording, and are gone when it is replayed."""
    import torch

    was = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)
