"""A decoder as data: everything that one decode step reads, independent of how it is computed.

Filled from a transformers model (techniques/decoding/native_decode/programs.py) and run by cpu/decoder.py in C++ or
cuda/decoder.py in Triton. Loads no torch, because techniques read it earlier. A block computes, x float32 [rows, width]
being the residual:

    q, k, v = linear(norm(x, first), qkv);  k and v go to the cache
    x = x + linear(attention(rotary(q), rotary(k), v), output)
    h = norm(x, second)
    x = x + linear(activation(linear(h, gate)) * linear(h, up), down)      without a gate: activation(linear(h, up))

and the logits are linear(norm(x, final), head).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

RotaryTable: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Cosines and sines, float32 [length, head_size / 2] each."""
WeightKind = Literal["w3k", "w4", "w4k", "w8", "bf16"]
"""How a matrix is stored: numbers of 3, 4 or 8 bits in groups of inputs that share a scale, or bfloat16.
The values of w4 are evenly spaced; those of w3k and w4k are uneven (four_bits/scheme.py)."""
FEW_BITS: tuple[WeightKind, ...] = ("w3k", "w4", "w4k")
"""The kinds whose errors calibration has make up for each other."""
UNEVEN: tuple[WeightKind, ...] = ("w3k", "w4k")
CacheKind = Literal["bf16", "int8", "int4"]
"""How keys and values are stored; int8 and int4 have one float32 scale for each head of each token. int4 ones are
rotated before they are rounded, and multiplied as integers; the CUDA operator has none."""
Activation = Literal["gelu_tanh", "gelu", "relu", "silu"]
GROUPS = (32, 64, 128)
"""Inputs of an output that may share a scale. The activations that these meet are quantized by the same groups."""

MOST_HEAD_SIZE = 512
"""Numbers of a head, which are a multiple of four; kMostHeadSize in instruction_sets.h."""


@dataclass(frozen=True)
class Norm:
    """LayerNorm ("layer") or RMSNorm ("rms"). weight, bias: float32 [width]."""

    kind: Literal["layer", "rms"]
    weight: "torch.Tensor"
    bias: "torch.Tensor | None"
    epsilon: float


@dataclass(frozen=True)
class Matrix:
    """A linear layer, or a table whose rows, its outputs, are looked up.

    The tensors are laid out for one operator, as cpu/packing.py and cuda/packing.py say. `group` is 0 for bf16, which
    has no scale. `unit` is what an output's scales are multiples of, if anything. bias: float32 [outputs]. Only a head
    and an embedding may have `finer` rows.
    """

    kind: WeightKind
    outputs: int
    inputs: int
    group: int
    numbers: "torch.Tensor"
    scale: "torch.Tensor | None"
    bias: "torch.Tensor | None"
    unit: "torch.Tensor | None" = None
    finer: "FinerRows | None" = None


@dataclass(frozen=True)
class FinerRows:
    """What rounding has left of some rows of a matrix, rounded in its turn: the sums are twice as many bits.

    rows: int64 [count], ascending; matrix: [count, inputs], of the same kind and group.
    """

    rows: "torch.Tensor"
    matrix: Matrix


@dataclass(frozen=True)
class Block:
    """`qkv` are matrices whose outputs, one after the other, are all heads' queries, then keys, then values.

    GPT-2 has one, other families three. `scale` is what products of queries and keys are multiplied by; `window` is how
    many tokens a token attends to, itself included, None for all.
    """

    first: Norm
    qkv: tuple[Matrix, ...]
    output: Matrix
    second: Norm
    gate: Matrix | None
    up: Matrix
    down: Matrix
    scale: float
    window: int | None


@dataclass(frozen=True)
class Program:
    """A whole decoder.

    embedding: [vocabulary, width], the head itself where they are tied; positions: [context, width], whose rows are
    added to the embeddings of the tokens at each position, or None; rotary: gives for a length the cosines and sines,
    float32 [length, head_size / 2], by which the pairs (i, i + head_size / 2) of a head's queries and keys are turned,
    or None.
    """

    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    context: int
    activation: Activation
    embedding: Matrix
    positions: Matrix | None
    rotary: Callable[[int], RotaryTable] | None
    blocks: tuple[Block, ...]
    final: Norm
    head: Matrix

    @property
    def device(self) -> "torch.device":
        return self.head.numbers.device


@dataclass(frozen=True)
class Sampling:
    """How a next token is chosen from its logits.

    A temperature of 0 takes the most likely one; any other draws from softmax(logits / temperature), with numbers that
    depend on the seed, the sequence and the position alone. Raises ValueError if temperature is negative or not finite.
    """

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a finite number of at least 0, not {self.temperature}.")
