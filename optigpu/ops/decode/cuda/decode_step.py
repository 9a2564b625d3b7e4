"""A decode step of the CUDA decoder: its kernels and their memory. It is launched, or recorded once as a CUDA graph.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Callable

import torch

from optigpu.ops.decode.cuda.packing import places_of_finer
from optigpu.ops.decode.cuda.state import LayerCache, State
from optigpu.ops.decode.cuda.triton_attention import PartialSoftmax, attention
from optigpu.ops.decode.cuda.triton_embedding import embed_call
from optigpu.ops.decode.cuda.triton_linear import best_of, linear_call
from optigpu.ops.decode.cuda.triton_steps import choose_call, query_key_value_call
from optigpu.ops.decode.program import Block, CacheKind, Matrix, Mlp, Program
from optigpu.ops.launch import LaunchTarget


class CudaDecodeStep:
    """Appends the tokens of `state` and chooses the next ones; `run` launches the kernels, or their recorded graph.

    The program's Block.qkv must be joined where possible.
    """

    def __init__(self, program: Program, kv: CacheKind, sequences: int, capacity: int) -> None:
        self.sequences, self.capacity = sequences, capacity
        self._program, device = program, program.device
        self._target = LaunchTarget.of(device)
        cache = (program.kv_heads, capacity, program.head_size, device)
        self.state = State.empty(sequences, capacity, device)
        self.layers = tuple(LayerCache.empty(kv, sequences, *cache) for _ in program.blocks)
        self.rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        for rotary in program.rotaries:  # one, or none
            cosine, sine = (table.to(device).contiguous() for table in rotary(capacity))
            self.rotary = (cosine, sine)
        finer = program.head.finer.matrix.outputs if program.head.finer else 0
        widths = (program.width, program.inner, program.heads * program.head_size, program.vocabulary, finer)
        memory = (torch.empty(sequences, width, device=device) for width in widths)
        self._x, self._inner, self._attended, self.logits, self._finer = memory
        self._query = torch.empty(sequences, program.heads, program.head_size, device=device)
        self._parts = PartialSoftmax.of(self._query, self.layers[0], self._target)
        self._finer_places = places_of_finer(program.embedding)
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
        program, x = self._program, self._x
        embed_call(self.state, program.embedding, self._finer_places, program.positions, x).run()
        for block, layer in zip(program.blocks, self.layers, strict=True):
            self._attend(block, layer)
            self._feed_forward(block)
        self._find_logits(program.head)
        choose_call(self._best, self.state).run()

    def _find_logits(self, head: Matrix) -> None:
        x, finer, norm, target = self._x, self._finer, self._program.final, self._target
        if head.finer is None:
            linear_call(x, head, self.logits, target, norm=norm, best=self._best).run()
            return
        linear_call(x, head.finer.matrix, finer, target, norm=norm).run()
        self.logits.zero_().index_copy_(1, head.finer.rows, finer)
        linear_call(x, head, self.logits, target, norm=norm, best=self._best, into="add").run()

    def _attend(self, block: Block, layer: LayerCache) -> None:
        head, position, attended = 0, self.state.position, self._attended
        for matrix in block.qkv:
            arguments = (self._x, block.first, matrix, head, self.rotary, position, self._query)
            query_key_value_call(*arguments, layer, self._target).run()
            head += matrix.outputs // self._program.head_size
        attention(self._query, layer, self._parts, position, attended, block.scale, block.window)
        linear_call(attended, block.output, self._x, self._target, into="add").run()

    def _feed_forward(self, block: Block) -> None:
        target, norm, activation, mlp = self._target, block.second, self._program.activation, block.mlp
        assert isinstance(mlp, Mlp)  # or the program was refused
        x, inner, gate, up = self._x, self._inner, mlp.gate, mlp.up
        if gate is None:
            linear_call(x, up, inner, target, norm=norm, activation=activation).run()
        elif (gate.kind, gate.group) == (up.kind, up.group):
            linear_call(x, up, inner, target, norm=norm, gate=gate, activation=activation).run()
        else:
            linear_call(x, up, inner, target, norm=norm).run()
            linear_call(x, gate, inner, target, norm=norm, activation=activation, into="times").run()
        linear_call(inner, mlp.down, x, target, into="add").run()
