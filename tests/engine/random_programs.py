"""Decoder programs with random weights, packed for the CPU operator."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from optigpu.ops.decode.cpu.packing import pack
from optigpu.ops.decode.program import Activation, Block, FinerRows, Matrix, Norm, Program, WeightKind

CONTEXT = 64


class Shape(NamedTuple):
    """Of a decoder.

    `rotary` ones have RMSNorm, a gate, three matrices of queries, keys and values, and an embedding of their own;
    others have positions and the head's matrix for embedding, in which every fifth row is finer.
    """

    rotary: bool = False
    width: int = 128
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 32
    inner: int = 256
    vocabulary: int = 203
    blocks: int = 2
    window: int | None = None
    activation: Activation = "gelu_tanh"


LIKE_GPT2 = Shape()
LIKE_LLAMA = Shape(True, kv_heads=2, inner=384, window=7, activation="silu")


@cache
def random_program(shape: Shape, kind: WeightKind, group: int = 32, seed: int = 0) -> Program:
    """Weights whose outputs are about as large as their inputs; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    def matrix(outputs: int, inputs: int, biased: bool = True) -> Matrix:
        return pack(
            draw(outputs, inputs) * inputs**-0.5, draw(outputs) * 0.1 if biased else None, kind, group
        )

    def norm() -> Norm:
        weight = 1 + 0.1 * draw(shape.width)
        return (
            Norm("rms", weight, None, 1e-5)
            if shape.rotary
            else Norm("layer", weight, 0.1 * draw(shape.width), 1e-5)
        )

    def block() -> Block:
        heads, shared = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        outputs = (heads, shared, shared) if shape.rotary else (heads + 2 * shared,)
        return Block(
            norm(),
            tuple(matrix(number, shape.width) for number in outputs),
            matrix(shape.width, heads),
            norm(),
            matrix(shape.inner, shape.width, False) if shape.rotary else None,
            matrix(shape.inner, shape.width),
            matrix(shape.width, shape.inner),
            shape.head_size**-0.5,
            shape.window,
        )

    def table(rows: int, size: float) -> Matrix:
        return pack(size * draw(rows, shape.width), None, "bf16" if kind == "bf16" else "w8", group)

    head = matrix(shape.vocabulary, shape.width, False)
    if not shape.rotary:
        rows = torch.arange(1, shape.vocabulary, 5)
        left = 0.1 * shape.width**-0.5 * draw(len(rows), shape.width)
        head = replace(head, finer=FinerRows(rows, pack(left, None, kind, group)))
    return Program(
        *(shape.width, shape.heads, shape.kv_heads, shape.head_size, shape.inner, shape.vocabulary, CONTEXT),
        shape.activation,
        table(shape.vocabulary, 1.0) if shape.rotary else head,
        None if shape.rotary else table(CONTEXT, 0.3 * shape.width**-0.5),
        _rotary(shape.head_size) if shape.rotary else None,
        tuple(block() for _ in range(shape.blocks)),
        norm(),
        head,
    )


def _rotary(size: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def table(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        return angles.cos(), angles.sin()

    return table


def tokens(shape: Shape, sequences: int, count: int, seed: int = 1) -> torch.Tensor:
    """Ids [sequences, count], always the same."""
    return torch.randint(shape.vocabulary, (sequences, count), generator=torch.Generator().manual_seed(seed))
