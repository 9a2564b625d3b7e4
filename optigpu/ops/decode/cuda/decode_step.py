"""One decode step for a number of sequences and a cache size: its memory, and its kernels in their order.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Callable

import torch

from optigpu.ops.decode.cuda.layer_cache import LayerCache
from optigpu.ops.decode.cuda.packing import places_of_finer
from optigpu.ops.decode.cuda.triton_attention import PartialSoftmax, attention
from optigpu.ops.decode.cuda.triton_linear import best_of, linear_call
from optigpu.ops.decode.cuda.triton_steps import State, choose_call, embed_call, query_key_value_call
from optigpu.ops.decode.program import Block, CacheKind, Matrix, Program
from optigpu.ops.launch import LaunchTarget


class CudaDecodeStep:
    """Appends the tokens of `state` and chooses the next ones; `run` launches the kernels, or their recorded graph.

    The program's Block.qkv must be joined where possible.
    """

    def __init__(self, program: Program, kv: CacheKind, sequences: int, capacity: int) -> None:
        device = program.device
        self.sequences, self.capacity = sequences, capacity
        self._program = program
        self._target = LaunchTarget.of(device)
        empty = _allocator(device, sequences)
        self.state = State(
            empty(dtype=torch.int64).zero_(),
            empty(dtype=torch.int32).zero_(),
            empty(dtype=torch.int32).zero_(),
            empty(capacity, dtype=torch.int64),
        )
        self.layers = [
            LayerCache.empty(kv, sequences, program.kv_heads, capacity, program.head_size, device)
            for _ in program.blocks
        ]
        self.rotary = None if program.rotary is None else program.rotary(capacity)
        if self.rotary is not None:
            cosine, sine = (table.to(device).contiguous() for table in self.rotary)
            self.rotary = cosine, sine
        self._x = empty(program.width)
        self._query = empty(program.heads, program.head_size)
        self._attended = empty(program.heads * program.head_size)
        self._inner = empty(program.inner)
        self.logits = empty(program.vocabulary)
        self._finer_places = places_of_finer(program.embedding)
        self._finer = empty(program.head.finer.matrix.outputs if program.head.finer else 0)
        self._parts = PartialSoftmax.of(self._query, self.layers[0], self._target)
        self._best = best_of(program.head, sequences, self._target)
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

    def _launch(self) -> None:
        program = self._program
        embed_call(self.state, program.embedding, self._finer_places, program.positions, self._x).run()
        for block, layer in zip(program.blocks, self.layers, strict=True):
            self._attend(block, layer)
            self._feed_forward(block)
        self._find_logits(program.head)
        choose_call(self._best, self.state).run()

    def _find_logits(self, head: Matrix) -> None:
        x, norm, target = self._x, self._program.final, self._target
        if head.finer is None:
            linear_call(x, head, self.logits, target, norm=norm, best=self._best).run()
            return
        linear_call(x, head.finer.matrix, self._finer, target, norm=norm).run()
        self.logits.zero_().index_copy_(1, head.finer.rows, self._finer)
        linear_call(x, head, self.logits, target, norm=norm, best=self._best, into="add").run()

    def _attend(self, block: Block, layer: LayerCache) -> None:
        head = 0
        for matrix in block.qkv:
            query_key_value_call(
                self._x,
                block.first,
                matrix,
                head,
                self.rotary,
                self.state.position,
                self._query,
                layer,
                self._target,
            ).run()
            head += matrix.outputs // self._program.head_size
        attention(
            self._query, layer, self._parts, self.state.position, self._attended, block.scale, block.window
        )
        linear_call(self._attended, block.output, self._x, self._target, into="add").run()

    def _feed_forward(self, block: Block) -> None:
        x, inner, target, activation = self._x, self._inner, self._target, self._program.activation
        gate, up = block.gate, block.up
        if gate is None:
            linear_call(x, up, inner, target, norm=block.second, activation=activation).run()
        elif (gate.kind, gate.group) == (up.kind, up.group):
            linear_call(x, up, inner, target, norm=block.second, gate=gate, activation=activation).run()
        else:
            linear_call(x, up, inner, target, norm=block.second).run()
            times = linear_call(
                x, gate, inner, target, norm=block.second, activation=activation, into="times"
            )
            times.run()
        linear_call(inner, block.down, x, target, into="add").run()


def _allocator(device: torch.device, sequences: int) -> Callable[..., torch.Tensor]:
    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(sequences, *shape, dtype=dtype, device=device)

    return empty
