"""What a persistent kernel must know of a decode step when it is compiled, and where the step's weights are.

A plan is a constant of the kernel. Weights and caches are found by their addresses: first those of what all blocks
share, then those of each block, in the same order. A `place` is where in its part of the table a matrix, a norm or a
cache begins.

Imported only where a GPU is used, because it loads Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton

from optigpu.ops.decode.cuda.layer_cache import LayerCache
from optigpu.ops.decode.cuda.step_memory import StepMemory
from optigpu.ops.decode.cuda.triton_attention import tokens_at_once
from optigpu.ops.decode.cuda.triton_linear import Into, output_bytes
from optigpu.ops.decode.program import Block, Matrix, Norm, Program
from optigpu.ops.launch import WARPS_A_MULTIPROCESSOR, LaunchTarget, padded, shared_tile
from optigpu.vocabulary import UnsupportedError

ALIGNMENT = 16
"""Bytes of the longest load."""
WARPS = 8
"""Of a program. With 256 threads each has 255 registers, in which all parts of a step fit; with 512 they do not."""


@dataclass(frozen=True)
class MatrixPlan:
    """Four addresses: numbers, scales, units and biases, or the numbers' once more for what is absent."""

    place: int
    kind: str
    group: int
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class NormPlan:
    """Two addresses: weights and biases. `kind` is rms, layer or none."""

    place: int
    kind: str
    bias: bool
    epsilon: float


@dataclass(frozen=True)
class ProductPlan:
    """`gate` is the matrix itself where there is none. `tile`: outputs at a time, of each stream."""

    matrix: MatrixPlan
    norm: NormPlan
    gate: MatrixPlan
    gated: bool
    activation: str
    into: Into
    padded: int
    tile: int


@dataclass(frozen=True)
class AttentionPlan:
    """Five addresses: keys, values, their steps, and what is fresh."""

    place: int
    scale: float
    window: int
    heads: int
    kv_heads: int
    head_size: int
    padded: int
    sharing: int
    members: int
    tokens: int
    parts: int
    int8: bool
    rotary: bool


@dataclass(frozen=True)
class BlockPlan:
    """`addresses`: how many a block has."""

    qkv: ProductPlan
    attention: AttentionPlan
    output: ProductPlan
    up: ProductPlan
    down: ProductPlan
    addresses: int


@dataclass(frozen=True)
class StepPlan:
    """`positions` and `finer` are None for a program without them.

    `shared`: addresses before the first block's. `choices`: the programs, up to a power of two.
    """

    embedding: MatrixPlan
    positions: MatrixPlan | None
    finer_embedding: MatrixPlan | None
    block: BlockPlan
    finer: ProductPlan | None
    head: ProductPlan
    shared: int
    choices: int
    dp4a: bool


@dataclass(frozen=True)
class Division:
    """How a step is divided: among so many programs, all of which must run at once."""

    target: LaunchTarget
    programs: int

    @staticmethod
    def of(target: LaunchTarget) -> "Division":
        """A program for each multiprocessor."""
        return Division(target, max(1, target.warps // WARPS_A_MULTIPROCESSOR))

    def tile(self, matrix: Matrix, outputs: int, streams: int) -> int:
        """Outputs of a tile; `outputs` are those of one stream."""
        return shared_tile(output_bytes(matrix), outputs, self.target, self.programs, streams)


@dataclass
class Addresses:
    """A part of the table, while it is made."""

    found: list[int] = field(default_factory=list)

    def add(self, first: torch.Tensor, *others: torch.Tensor | None) -> int:
        """The place of the first. Raises UnsupportedError if one is not aligned."""
        place = len(self.found)
        for tensor in (first, *others):
            address = (first if tensor is None else tensor).data_ptr()
            if address % ALIGNMENT:
                raise UnsupportedError(
                    f"A persistent kernel needs weights aligned to {ALIGNMENT} bytes; one is at {address}."
                )
            self.found.append(address)
        return place

    def matrix(self, matrix: Matrix) -> MatrixPlan:
        place = self.add(matrix.numbers, matrix.scale, matrix.unit, matrix.bias)
        return MatrixPlan(
            place, matrix.kind, matrix.group, matrix.inputs, matrix.outputs, matrix.bias is not None
        )

    def norm(self, norm: Norm) -> NormPlan:
        return NormPlan(self.add(norm.weight, norm.bias), norm.kind, norm.bias is not None, norm.epsilon)


NO_NORM = NormPlan(0, "none", False, 0.0)


def planned(program: Program, memory: StepMemory, division: Division) -> tuple[StepPlan, list[int]]:
    """The plan and all addresses. Raises UnsupportedError for a program whose blocks are not all alike."""
    blocks, rows = zip(
        *(
            _block(program, block, layer, memory, division)
            for block, layer in zip(program.blocks, memory.layers, strict=True)
        ),
        strict=True,
    )
    if len(set(blocks)) > 1:
        raise UnsupportedError(
            "One persistent kernel needs blocks that are all alike; this model's differ in their formats or shapes."
        )
    shared, final = Addresses(), program.final
    norm = shared.norm(final)
    head, embedding = program.head, program.embedding
    finer = None
    if head.finer is not None:
        finer = _product(shared, head.finer.matrix, division, norm=norm)
    plan = StepPlan(
        embedding=shared.matrix(embedding),
        positions=None if program.positions is None else shared.matrix(program.positions),
        finer_embedding=None if embedding.finer is None else shared.matrix(embedding.finer.matrix),
        block=blocks[0],
        finer=finer,
        head=_product(shared, head, division, norm=norm, into="store" if finer is None else "add"),
        shared=len(shared.found),
        choices=triton.next_power_of_2(division.programs),
        dp4a=division.target.dp4a,
    )
    return plan, [*shared.found, *(address for row in rows for address in row)]


def _block(
    program: Program, block: Block, layer: LayerCache, memory: StepMemory, division: Division
) -> tuple[BlockPlan, Sequence[int]]:
    found = Addresses()
    if len(block.qkv) != 1:
        raise UnsupportedError(
            "One persistent kernel needs queries, keys and values of one format; here they have several."
        )
    gate, up = block.gate, block.up
    if gate is not None and (gate.kind, gate.group) != (up.kind, up.group):
        raise UnsupportedError(
            f"One persistent kernel needs a gate of the format of the matrix beside it: {gate.kind} is not {up.kind}."
        )
    first, second = found.norm(block.first), found.norm(block.second)
    plan = BlockPlan(
        qkv=_product(found, block.qkv[0], division, norm=first, pairs=True),
        attention=_attention(found, program, block, layer, memory),
        output=_product(found, block.output, division, into="add"),
        up=_product(found, up, division, norm=second, gate=gate, activation=program.activation),
        down=_product(found, block.down, division, into="add"),
        addresses=len(found.found),
    )
    return plan, found.found


def _product(
    found: Addresses,
    matrix: Matrix,
    division: Division,
    *,
    norm: NormPlan = NO_NORM,
    gate: Matrix | None = None,
    activation: str = "none",
    into: Into = "store",
    pairs: bool = False,
) -> ProductPlan:
    """With `pairs` an output goes with another of the same matrix."""
    plan = found.matrix(matrix)
    outputs = matrix.outputs // 2 if pairs else matrix.outputs
    return ProductPlan(
        matrix=plan,
        norm=norm,
        gate=plan if gate is None else found.matrix(gate),
        gated=gate is not None,
        activation=activation,
        into=into,
        padded=padded(matrix.inputs),
        tile=division.tile(matrix, outputs, streams=2 if pairs or gate else 1),
    )


def _attention(
    found: Addresses, program: Program, block: Block, layer: LayerCache, memory: StepMemory
) -> AttentionPlan:
    sharing, size = program.heads // program.kv_heads, program.head_size
    return AttentionPlan(
        place=found.add(layer.keys, layer.values, layer.key_steps, layer.value_steps, layer.fresh),
        scale=block.scale,
        window=block.window or 0,
        heads=program.heads,
        kv_heads=program.kv_heads,
        head_size=size,
        padded=triton.next_power_of_2(size),
        sharing=sharing,
        members=triton.next_power_of_2(sharing),
        tokens=tokens_at_once(sharing, size),
        parts=memory.parts.tops.shape[1],
        int8=layer.key_steps is not None,
        rotary=memory.rotary is not None,
    )
