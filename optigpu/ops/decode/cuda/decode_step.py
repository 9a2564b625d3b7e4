"""A decode step of the CUDA decoder: its kernels and their memory. It is launched, or recorded once as a CUDA graph.

What one kernel leaves for another is memory of the launch, which a graph keeps for itself. Imported only where a GPU is
used, because it loads Triton.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from optigpu.ops.decode.cuda.packing import joined, places_of_finer, rows_from, stacked
from optigpu.ops.decode.cuda.state import LayerCache, State
from optigpu.ops.decode.cuda.triton_attention import PartialSoftmax, attend_call, join_call
from optigpu.ops.decode.cuda.triton_embedding import embed_call
from optigpu.ops.decode.cuda.triton_linear import Into, best_of, linear_call
from optigpu.ops.decode.cuda.triton_steps import add_call, choose_call, route_call
from optigpu.ops.decode.program import (
    Activation,
    Block,
    CacheKind,
    Expert,
    Matrix,
    Mixture,
    Mlp,
    Norm,
    Program,
)
from optigpu.ops.launch import KernelCall, LaunchTarget

Products = list[partial[KernelCall]]
"""Calls of linear_call without x and y."""
Stage = tuple[int, Products, Products]
"""How many inner numbers an MLP or an expert has, what makes them, and what makes outputs of them."""


def _stages(mlp: Mlp | Mixture, activation: Activation, target: LaunchTarget) -> list[Stage]:
    """Of an MLP, whose outputs the step makes; or of the experts that are chosen among, then of the shared one."""
    plain = partial(linear_call, target=target)
    if isinstance(mlp, Mixture):
        made = partial(plain, activation=activation, clamp=mlp.clamp)
        groups = [mlp.experts, *([(mlp.shared,)] if mlp.shared else [])]
        return [_of_experts(group, mlp.pairs, plain, made) for group in groups]
    made, gate, up = partial(plain, activation=activation), mlp.gate, mlp.up
    if gate is None or (gate.kind, gate.group) == (up.kind, up.group):
        return [(up.outputs, [partial(made, matrix=up, gate=gate)], [])]
    return [(up.outputs, [partial(plain, matrix=up), partial(made, matrix=gate, into="times")], [])]


def _of_experts(
    experts: Sequence[Expert], pairs: bool, plain: partial[KernelCall], made: partial[KernelCall]
) -> Stage:
    inner, outputs = experts[0].down.inputs, experts[0].down.outputs

    def apart(call: partial[KernelCall], matrices: list[Matrix], count: int) -> Products:
        wholes = ((rows_from(whole, slice(None), count), places) for whole, places in stacked(matrices))
        return [partial(call, matrix=whole, experts=(places, count, 1)) for whole, places in wholes]

    narrow = apart(plain, [expert.down for expert in experts], outputs)
    both = [joined(expert.up) for expert in experts]
    if max(map(len, both)) > 1:  # gates of other kinds, by which the others' products are multiplied
        ups, gates = ([expert.up[place] for expert in experts] for place in (1, 0))
        return inner, apart(plain, ups, inner) + apart(partial(made, into="times"), gates, inner), narrow
    wide: Products = []
    first, step = (1, 2) if pairs else (inner, 1)
    for whole, places in stacked([matrix for (matrix,) in both]):
        gate, up = (rows_from(whole, slice(row, None), inner) for row in (0, first))
        wide.append(partial(made, matrix=up, gate=gate, experts=(places, 2 * inner, step)))
    return inner, wide, narrow


class CudaDecodeStep:
    """Appends the tokens of `state` and chooses the next ones; `run` launches the kernels, or their recorded graph.

    The program's Block.qkv must be joined where possible.
    """

    def __init__(self, program: Program, kv: CacheKind, sequences: int, capacity: int) -> None:
        self.sequences, self.capacity = sequences, capacity
        self._program, self._device = program, program.device
        self._target = LaunchTarget.of(self._device)
        cache = (program.kv_heads, capacity, program.head_size, self._device)
        self.state = State.empty(sequences, capacity, self._device)
        self.layers = tuple(LayerCache.empty(kv, sequences, *cache) for _ in program.blocks)
        tables = ([table.to(self._device) for table in rotary(capacity)] for rotary in program.rotaries)
        self.rotaries = [(cosines.contiguous(), sines.contiguous()) for cosines, sines in tables]
        self._stages = [_stages(block.mlp, program.activation, self._target) for block in program.blocks]
        self._x = torch.empty(sequences, program.width, device=self._device)
        self.logits = torch.empty(sequences, program.vocabulary, device=self._device)
        self._parts = PartialSoftmax.of(program.heads, self.layers[0], self._target)
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
        program = self._program
        tables = (program.embedding, self._finer_places, program.positions)
        embed_call(self.state, *tables, self._x, program.embedding_scale).run()
        for block, layer, stages in zip(program.blocks, self.layers, self._stages, strict=True):
            attended = (self._attended(block, layer), block.output, block.after_attention)
            if not program.parallel:
                self._add(*attended)
            add_fed = self._fed(block, stages)
            if program.parallel:
                self._add(*attended)
            add_fed()
        self._find_logits(program.head)
        choose_call(self._best, self.state).run()

    def _find_logits(self, head: Matrix) -> None:
        x, norm, target, cap = self._x, self._program.final, self._target, self._program.logit_cap
        into: Into = "add" if head.finer else "store"
        if head.finer is not None:
            finer = self._product(x, head.finer.matrix, norm)
            self.logits.zero_().index_copy_(1, head.finer.rows, finer)
        linear_call(x, head, self.logits, target, norm=norm, best=self._best, into=into, cap=cap).run()

    def _product(self, x: torch.Tensor, matrix: Matrix, norm: Norm | None = None) -> torch.Tensor:
        y = torch.empty(self.sequences, matrix.outputs, device=self._device)
        linear_call(x, matrix, y, self._target, norm=norm).run()
        return y

    def _add(self, x: torch.Tensor, matrix: Matrix, after: Norm | None) -> None:
        """To the residual, a linear layer that is normed after it."""
        scale = self._program.residual_scale
        if after is None:
            linear_call(x, matrix, self._x, self._target, into="add", factor=scale).run()
        else:
            add_call(self._product(x, matrix)[None], None, after, self._x, scale).run()

    def _attended(self, block: Block, layer: LayerCache) -> torch.Tensor:
        program = self._program
        found = [self._product(self._x, matrix, block.first) for matrix in block.qkv]
        angles = None if block.rotary is None else self.rotaries[block.rotary]
        y = torch.empty(self.sequences, program.heads * program.head_size, device=self._device)
        whole = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        attend_call(whole, program, block, angles, layer, self._parts, self.state.position).run()
        join_call(self._parts, block.sinks, y).run()
        return y

    def _fed(self, block: Block, stages: list[Stage]) -> Callable[[], None]:
        """What adds to the residual that which the MLP makes of the present one."""
        mlp, x, norm, width = block.mlp, self._x, block.second, self._program.width
        if isinstance(mlp, Mlp):
            ((count, wide, _),) = stages
            inner = torch.empty(self.sequences, count, device=self._device)
            for call in wide:
                call(x, y=inner, norm=norm).run()
            return partial(self._add, inner, mlp.down, block.after_mlp)
        gate = None if mlp.shared_gate is None else self._product(x, mlp.shared_gate, norm)
        shape = (mlp.chosen + bool(mlp.shared), self.sequences)
        chosen = torch.empty(shape, dtype=torch.int32, device=self._device)
        shares, y = (torch.empty(*shape, *more, device=self._device) for more in ((), (width,)))
        route_call(self._product(x, mlp.router, norm), gate, mlp, chosen, shares).run()
        groups = zip(stages, y.split(mlp.chosen), chosen.split(mlp.chosen), strict=True)
        for (count, wide, narrow), part, some in groups:
            inner = torch.empty(some.numel(), count, device=self._device)
            for call in wide:
                call(x, y=inner, norm=norm, chosen=some).run()
            for call in narrow:
                call(inner, y=part.flatten(0, 1), chosen=some).run()
        return add_call(y, shares, block.after_mlp, x, self._program.residual_scale).run
