"""One decode step for a number of sequences and a cache size: its kernels in their order, launched one by one.

Imported only where a GPU is used, because it loads Triton.
"""

from optigpu.ops.decode.cuda.layer_cache import LayerCache
from optigpu.ops.decode.cuda.recorded_step import RecordedStep
from optigpu.ops.decode.cuda.triton_attention import attention
from optigpu.ops.decode.cuda.triton_embedding import embed_call
from optigpu.ops.decode.cuda.triton_linear import best_of, linear_call
from optigpu.ops.decode.cuda.triton_steps import choose_call, query_key_value_call
from optigpu.ops.decode.program import Block, CacheKind, Matrix, Program


class CudaDecodeStep(RecordedStep):
    """The program's Block.qkv must be joined where possible."""

    def __init__(self, program: Program, kv: CacheKind, sequences: int, capacity: int) -> None:
        super().__init__(program, kv, sequences, capacity)
        self._best = best_of(program.head, sequences, self._target)

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
            query_key_value_call(
                memory.x,
                block.first,
                matrix,
                head,
                self.rotary,
                self.state.position,
                memory.query,
                layer,
                self._target,
            ).run()
            head += matrix.outputs // self._program.head_size
        attention(
            *(memory.query, layer, memory.parts, self.state.position, memory.attended),
            *(block.scale, block.window),
        )
        linear_call(memory.attended, block.output, memory.x, self._target, into="add").run()

    def _feed_forward(self, block: Block) -> None:
        x, inner, target, activation = (
            self._memory.x,
            self._memory.inner,
            self._target,
            self._program.activation,
        )
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
