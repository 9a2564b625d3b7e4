"""Decoder programs of a preset's shapes with random numbers in their matrices, packed for the CPU operator as they are.

Nothing is loaded, drawn as weights or quantized: how fast a program runs does not depend on its numbers. `forced` makes
one write a given text, so that guesses can be measured on any text at the full cost of each pass.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from optigpu.documents.shapes import ModelFacts
from optigpu.ops.decode.cpu.packing import numbers_shape, pack
from optigpu.ops.decode.program import Block, Matrix, Norm, Program, RotaryTable, WeightKind

LARGE = 1000.0
"""What a position adds to the residual where a text is forced: far more than the layers do."""
_CHUNK = 8
"""Inputs of 4-bit weights in 64 bytes."""


def shaped_program(facts: ModelFacts, context: int, group: int = 32, kind: WeightKind = "w4") -> Program:
    """With one kind of packed weights, RMSNorm, rotary embeddings, a gate and a tied head as small Llamas have them."""
    source = torch.Generator().manual_seed(0)
    width, inner = facts.hidden_size, facts.inner_size or 4 * facts.hidden_size
    heads, shared = facts.heads * facts.head_size, facts.kv_heads * facts.head_size

    def norm() -> Norm:
        return Norm("rms", torch.ones(width), None, 1e-5)

    def matrix(outputs: int, inputs: int) -> Matrix:
        return _random_matrix(outputs, inputs, group, kind, source)

    def block() -> Block:
        qkv = tuple(matrix(outputs, width) for outputs in (heads, shared, shared))
        return Block(
            *(norm(), qkv, matrix(width, heads), norm()),
            *(matrix(inner, width), matrix(inner, width), matrix(width, inner)),
            *(facts.head_size**-0.5, None),
        )

    def rotary(length: int) -> RotaryTable:
        size = facts.head_size
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        return angles.cos(), angles.sin()

    head = matrix(facts.vocabulary, width)
    return Program(
        *(width, facts.heads, facts.kv_heads, facts.head_size, inner, facts.vocabulary, context, "silu"),
        head,
        None,
        rotary,
        tuple(block() for _ in range(facts.layers)),
        norm(),
        head,
    )


def forced(program: Program, text: Sequence[int]) -> Program:
    """The program with positions and a head that choose text[i + 1] after any token at position i.

    A pass does and reads all that it did, and looks up a row of positions. The text is at most as long as the program
    is wide.
    """
    positions = torch.zeros(program.context, program.width)
    places = torch.arange(len(text) - 1)
    positions[places, places] = LARGE
    head = program.head
    numbers = torch.full_like(head.numbers, 0x88)  # 8 stands for 0 in both halves of a byte
    unit = torch.full_like(head.unit, 0.01) if head.unit is not None else None
    scale = torch.ones_like(head.scale) if head.scale is not None else None
    for place, token in enumerate(text[1:]):
        block, row = divmod(token, 16)
        chunk, inner = divmod(place, _CHUNK)
        half, lane = divmod(inner, 4)
        numbers[block, chunk, 4 * row + lane] |= 0x07 << 4 * half  # 15 stands for 7
    return replace(
        program,
        positions=pack(positions, None, "w8", head.group),
        head=replace(head, numbers=numbers, unit=unit, scale=scale),
    )


def _random_matrix(
    outputs: int, inputs: int, group: int, kind: WeightKind, source: torch.Generator
) -> Matrix:
    blocks = -(-outputs // 16)

    def drawn(shape: tuple[int, ...], least: int, most: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(least, most, shape, dtype=dtype, generator=source)

    numbers = drawn(numbers_shape(kind, blocks, inputs), 0, 256, torch.uint8)
    scale = drawn((blocks, inputs // group, 16), 1, 127, torch.int8)
    unit = torch.full((blocks, 16), 3e-5, dtype=torch.bfloat16)
    return Matrix(kind, outputs, inputs, group, numbers, scale, None, unit)
