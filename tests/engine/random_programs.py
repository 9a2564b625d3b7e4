"""Decoder programs with random weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Literal, NamedTuple

import torch

from optigpu.ops.decode.cpu.packing import pack
from optigpu.ops.decode.program import (
    Activation,
    Block,
    Expert,
    FinerRows,
    HeadNorm,
    Matrix,
    Mixture,
    Mlp,
    Norm,
    Program,
    RotaryTable,
    WeightKind,
)

CONTEXT = 64
Packing = Callable[[torch.Tensor, torch.Tensor | None, WeightKind, int], Matrix]


class Shape(NamedTuple):
    """Of a decoder.

    `rotary` ones have RMSNorm, a gate, three matrices of queries, keys and values, and an embedding of their own;
    others have positions and the head's matrix for embedding, in which every fifth row is finer. Every second block has
    no `window` where `alternates`, and another table of angles. With `experts` the second block has a mixture of them.
    `positions` says how large they are beside the rows of the embedding.
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
    norms: Literal["before", "after", "both"] = "before"
    head_norms: Literal["head", "whole"] | None = None
    rotary_size: int | None = None
    neighbours: bool = False
    by_groups: bool = False
    parallel: bool = False
    alternates: bool = False
    sinks: bool = False
    scales: tuple[float, float] = (1.0, 1.0)
    caps: tuple[float | None, float | None] = (None, None)
    experts: int = 0
    shared: bool = False
    biases: bool = True
    positions: float = 0.3
    clamp: tuple[float, float] | None = None


LIKE_GPT2 = Shape()
LIKE_LLAMA = Shape(True, kv_heads=2, inner=384, window=7, activation="silu")
LIKE_GEMMA = LIKE_LLAMA._replace(
    kv_heads=1, norms="both", head_norms="head", alternates=True, scales=(8.0, 0.5), caps=(3.0, 2.0)
)
LIKE_NEOX = Shape(True, rotary_size=8, neighbours=True, by_groups=True, parallel=True, sinks=True)
LIKE_MIXTRAL = LIKE_LLAMA._replace(experts=5, shared=True)
LIKE_OSS = LIKE_LLAMA._replace(experts=4, sinks=True, clamp=(1.7, 2.0))
LIKE_OLMO = LIKE_LLAMA._replace(inner=128, norms="after", head_norms="whole", activation="relu2")


@cache
def random_program(
    shape: Shape,
    *kinds: WeightKind,
    group: int = 32,
    seed: int = 0,
    packing: Packing = pack,
    device: str = "cpu",
) -> Program:
    """Weights of `kinds` in turns, with outputs about as large as inputs; the same for the same arguments."""
    generator, kind = torch.Generator().manual_seed(seed), cycle(kinds)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(device)

    def matrix(outputs: int, inputs: int, biased: bool = shape.biases) -> Matrix:
        weight = draw(outputs, inputs) * inputs**-0.5
        return packing(weight, draw(outputs) * 0.1 if biased else None, next(kind), group)

    def norm(width: int = shape.width) -> Norm:
        weight = 1 + 0.1 * draw(width)
        return (
            Norm("rms", weight, None, 1e-5)
            if shape.rotary
            else Norm("layer", weight, 0.1 * draw(width), 1e-5)
        )

    def head_norm(count: int) -> HeadNorm | None:
        if shape.head_norms is None:
            return None
        return HeadNorm(norm(count), count if shape.head_norms == "whole" else shape.head_size)

    def mlp() -> Mlp:
        return Mlp(
            matrix(shape.inner, shape.width, False) if shape.rotary else None,
            matrix(shape.inner, shape.width),
            matrix(shape.width, shape.inner),
        )

    def expert(inner: int, count: int) -> Expert:
        up = tuple(matrix(2 * inner // count, shape.width) for _ in range(count))
        return Expert(up, matrix(shape.width, inner))

    def router(outputs: int) -> Matrix:
        return packing(draw(outputs, shape.width) * 3 * shape.width**-0.5, 0.1 * draw(outputs), "bf16", group)

    def mixture() -> Mixture:
        is_plain = shape.clamp is None
        return Mixture(
            router=router(shape.experts),
            experts=tuple(expert(shape.inner, 1) for _ in range(shape.experts)),
            chosen=2,
            score="sigmoid" if shape.shared else "softmax",
            normalized=not shape.shared,
            scale=1.5 if shape.shared else 1.0,
            choice_bias=draw(shape.experts) if shape.shared else None,
            shared=expert(2 * shape.inner, 2) if shape.shared else None,
            shared_gate=router(1) if shape.shared else None,
            pairs=not is_plain,
            clamp=shape.clamp,
        )

    def block(index: int) -> Block:
        heads, shared = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        outputs = (heads, shared, shared) if shape.rotary and not shape.by_groups else (heads + 2 * shared,)
        before, after = shape.norms != "after", shape.norms != "before"
        other = shape.alternates and index % 2 == 1
        return Block(
            first=norm() if before else None,
            qkv=tuple(matrix(number, shape.width) for number in outputs),
            output=matrix(shape.width, heads),
            second=norm() if before else None,
            mlp=mixture() if shape.experts and index == 1 else mlp(),
            scale=shape.head_size**-0.5,
            window=None if other else shape.window,
            rotary=int(other) if shape.rotary else None,
            query_norm=head_norm(heads),
            key_norm=head_norm(shared),
            sinks=draw(shape.heads) if shape.sinks else None,
            after_attention=norm() if after else None,
            after_mlp=norm() if after else None,
        )

    def table(rows: int, size: float) -> Matrix:
        return packing(size * draw(rows, shape.width), None, "bf16" if kinds == ("bf16",) else "w8", group)

    head, turned = matrix(shape.vocabulary, shape.width, False), shape.rotary_size or shape.head_size
    if not shape.rotary:
        rows = torch.arange(1, shape.vocabulary, 5, device=device)
        left = 0.1 * shape.width**-0.5 * draw(len(rows), shape.width)
        head = replace(head, finer=FinerRows(rows, packing(left, None, head.kind, group)))
    return Program(
        *(shape.width, shape.heads, shape.kv_heads, shape.head_size, shape.inner, shape.vocabulary, CONTEXT),
        shape.activation,
        table(shape.vocabulary, 1.0) if shape.rotary else head,
        None if shape.rotary else table(CONTEXT, shape.positions * shape.width**-0.5),
        tuple(rotary(turned, base, device) for base in (10000, 100)[: 1 + shape.alternates])
        if shape.rotary
        else (),
        tuple(block(index) for index in range(shape.blocks)),
        norm(),
        head,
        turned if shape.rotary else 0,
        *(shape.neighbours, shape.by_groups, shape.parallel),
        *shape.scales,
        *shape.caps,
    )


def rotary(size: int, base: float, device: str = "cpu") -> Callable[[int], RotaryTable]:
    def table(length: int) -> RotaryTable:
        angles = torch.arange(length)[:, None] / base ** (torch.arange(0, size, 2) / size)
        return angles.cos().to(device), angles.sin().to(device)

    return table


def tokens(shape: Shape, sequences: int, count: int, seed: int = 1) -> torch.Tensor:
    """Ids [sequences, count], always the same."""
    return torch.randint(shape.vocabulary, (sequences, count), generator=torch.Generator().manual_seed(seed))
