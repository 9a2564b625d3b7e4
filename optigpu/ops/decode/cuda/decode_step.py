"""A decode step of the CUDA decoder: its kernels and their memory. It is launched, or recorded once as a CUDA graph.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from optigpu.ops.decode.cuda.packing import places_of_finer
from optigpu.ops.decode.cuda.state import LayerCache, State
from optigpu.ops.decode.cuda.triton_attention import PartialSoftmax, attention
from optigpu.ops.decode.cuda.triton_embedding import embed_call
from optigpu.ops.decode.cuda.triton_linear import best_of, linear_call
from optigpu.ops.decode.cuda.triton_steps import choose_call, query_key_value_call
from optigpu.ops.decode.program import Block, CacheKind, Matrix, Program, RotaryTable
from optigpu.ops.launch import LaunchTarget


@dataclass(frozen=True)
class StepMemory:
    """float32 where nothing else is said, [sequences, ...] each.

    x: the residual, [width]; query: [heads, head_size]; attended: the same, flat; inner: [inner]; logits: [vocabulary];
    finer: the outputs of the head's finer rows, whose places are `finer_places`, int64 [vocabulary].
    """

    state: State
    layers: tuple[LayerCache, ...]
    rotary: "RotaryTable | None"
    x: torch.Tensor
    query: torch.Tensor
    parts: PartialSoftmax
    attended: torch.Tensor
    inner: torch.Tensor
    logits: torch.Tensor
    finer: torch.Tensor
    finer_places: torch.Tensor

    @staticmethod
    def of(
        program: Program, kv: CacheKind, sequences: int, capacity: int, target: LaunchTarget
    ) -> "StepMemory":
        """On the program's device."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(sequences, *shape, dtype=dtype, device=program.device)

        state = State.empty(sequences, capacity, program.device)
        layers = tuple(
            LayerCache.empty(kv, sequences, program.kv_heads, capacity, program.head_size, program.device)
            for _ in program.blocks
        )
        query, rotary = empty(program.heads, program.head_size), None
        if program.rotary is not None:
            cosine, sine = (table.to(program.device).contiguous() for table in program.rotary(capacity))
            rotary = (cosine, sine)
        return StepMemory(
            state=state,
            layers=layers,
            rotary=rotary,
            x=empty(program.width),
            query=query,
            parts=PartialSoftmax.of(query, layers[0], target),
            attended=empty(program.heads * program.head_size),
            inner=empty(program.inner),
            logits=empty(program.vocabulary),
            finer=empty(program.head.finer.matrix.outputs if program.head.finer else 0),
            finer_places=places_of_finer(program.embedding),
        )


class CudaDecodeStep:
    """Appends the tokens of `state` and chooses the next ones; `run` launches the kernels, or their recorded graph.

    The program's Block.qkv must be joined where possible.
    """

    def __init__(self, program: Program, kv: CacheKind, sequences: int, capacity: int) -> None:
        self.sequences, self.capacity = sequences, capacity
        self._program = program
        self._target = LaunchTarget.of(program.device)
        self._memory = memory = StepMemory.of(program, kv, sequences, capacity, self._target)
        self.state, self.layers = memory.state, memory.layers
        self.rotary, self.logits = memory.rotary, memory.logits
        self._best = best_of(program.head, sequences, self._target)
        self.run: Callable[[], None] = self._launch

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys, values and their steps."""
        parts = ((each.keys, each.values, each.key_steps, each.value_steps) for each in self.layers)
        return sum(tensor.nbytes for part in parts for tensor in part if tensor is not None)

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

    def _launch(self) -> None:
        program, memory = self._program, self._memory
        embed_call(self.state, program.embedding, memory.finer_places, program.positions, memory.x).run()
        for block, layer in zip(program.blocks, self.layers, strict=True):
            self._attend(block, layer)
            self._feed_forward(block)
        self._find_logits(program.head)
        choose_call(self._best, self.state).run()

    def _find_logits(self, head: Matrix) -> None:
        x, finer, norm, target = self._memory.x, self._memory.finer, self._program.final, self._target
        if head.finer is None:
            linear_call(x, head, self.logits, target, norm=norm, best=self._best).run()
            return
        linear_call(x, head.finer.matrix, finer, target, norm=norm).run()
        self.logits.zero_().index_copy_(1, head.finer.rows, finer)
        linear_call(x, head, self.logits, target, norm=norm, best=self._best, into="add").run()

    def _attend(self, block: Block, layer: LayerCache) -> None:
        memory, head = self._memory, 0
        for matrix in block.qkv:
            arguments = (memory.x, block.first, matrix, head, self.rotary, self.state.position, memory.query)
            query_key_value_call(*arguments, layer, self._target).run()
            head += matrix.outputs // self._program.head_size
        position, attended = self.state.position, memory.attended
        attention(memory.query, layer, memory.parts, position, attended, block.scale, block.window)
        linear_call(attended, block.output, memory.x, self._target, into="add").run()

    def _feed_forward(self, block: Block) -> None:
        memory, target, norm, activation = self._memory, self._target, block.second, self._program.activation
        x, inner, gate, up = memory.x, memory.inner, block.gate, block.up
        if gate is None:
            linear_call(x, up, inner, target, norm=norm, activation=activation).run()
        elif (gate.kind, gate.group) == (up.kind, up.group):
            linear_call(x, up, inner, target, norm=norm, gate=gate, activation=activation).run()
        else:
            linear_call(x, up, inner, target, norm=norm).run()
            linear_call(x, gate, inner, target, norm=norm, activation=activation, into="times").run()
        linear_call(inner, block.down, x, target, into="add").run()
