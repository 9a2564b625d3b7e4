"""A decoder as data: everything that one decode step reads, independent of how it is computed.

Filled from a transformers model (techniques/decoding/native_decode/programs.py) and run by cpu/decoder.py in C++ or
cuda/decoder.py in Triton. Loads no torch, because techniques read it earlier. A block computes, x float32 [rows, width]
being the residual, which begins as embedding * embedding_scale + positions:

    q, k, v = linear(norm(x, first), qkv);  q, k = rotary(norm(q, query_norm)), rotary(norm(k, key_norm))
    x = x + residual_scale * norm(linear(attention(q, k, v), output), after_attention)
    h = norm(x, second)
    h = activation(linear(h, gate)) * linear(h, up)                        without a gate: activation(linear(h, up))
    x = x + residual_scale * norm(linear(h, down), after_mlp)              or a mixture of experts that each do so

and the logits are cap(linear(norm(x, final), head), logit_cap), where cap(y, c) = c * tanh(y / c). A norm that is None
changes nothing. In a `parallel` block the second norm is given what the first one was. Attention is softmax(cap(scale *
q @ k, score_cap)) @ v; `sinks` stand beside the scores of each row, with values of 0.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    import torch

RotaryTable: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""Cosines and sines, float32 [length, rotary_size / 2] each."""
WeightKind = Literal["w3k", "w4", "w4k", "w5", "w6", "w8", "bf16"]
"""How a matrix is stored: numbers of 3 to 6 or 8 bits in groups of inputs that share a scale, or bfloat16.
The values of w3k and w4k are uneven (four_bits/scheme.py); those of the others are evenly spaced."""
WEIGHT_KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
FEW_BITS: tuple[WeightKind, ...] = ("w3k", "w4", "w4k", "w5", "w6")
"""The kinds whose errors calibration has make up for each other."""
UNEVEN: tuple[WeightKind, ...] = ("w3k", "w4k")
CacheKind = Literal["bf16", "int8", "int4"]
"""How keys and values are stored; int8 and int4 have one float32 scale for each head of each token. int4 ones are
rotated before they are rounded, and multiplied as integers; the CUDA operator has none."""
Activation = Literal["gelu_tanh", "gelu", "relu", "silu", "relu2"]
"""relu2 is the square of relu."""
GROUPS = (32, 64, 128)
"""Inputs of an output that may share a scale. The activations that these meet are quantized by the same groups."""

MOST_HEAD_SIZE = 512
"""Numbers of a head, which are a multiple of four; kMostHeadSize in instruction_sets.h."""


@dataclass(frozen=True)
class Norm:
    """LayerNorm ("layer") or RMSNorm ("rms"). weight, bias: float32 [width]; RMSNorm by 1 + w has 1 + w as weight."""

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
class HeadNorm:
    """A norm of queries or keys. Its weight has a number for each of all heads, float32 [heads * head_size].

    `together` are normed at once: a head's, or all of a token's.
    """

    norm: Norm
    together: int


@dataclass(frozen=True)
class Mlp:
    """`gate` is None where up alone is activated."""

    gate: Matrix | None
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Expert:
    """`up` are the gate's matrix and the other one, or one matrix with the outputs of both; then comes `down`."""

    up: tuple[Matrix, ...]
    down: Matrix


@dataclass(frozen=True)
class Mixture:
    """Experts, of which each token has the `chosen` ones that the router gives the highest scores, and `shared`.

    A token's experts are added, each times its score: softmax or sigmoid of the router's outputs, made to sum to 1
    where `normalized`, times `scale`. choice_bias: float32 [experts], added for the choice alone. The shared expert
    counts once, or sigmoid(shared_gate's output) times. An expert's inner numbers are activation(gate) * up; `pairs`
    says that gate and up are neighbouring outputs of one matrix, not halves. With `clamp` (alpha, limit) they are
    gate * sigmoid(alpha * gate) * (up + 1), where gate is at most the limit and up within it.
    """

    router: Matrix
    experts: tuple[Expert, ...]
    chosen: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scale: float = 1.0
    choice_bias: "torch.Tensor | None" = None
    shared: Expert | None = None
    shared_gate: Matrix | None = None
    pairs: bool = False
    clamp: tuple[float, float] | None = None


@dataclass(frozen=True)
class Block:
    """`qkv` are matrices whose outputs, one after the other, are queries, keys and values as Program.by_groups says.

    `scale` is what products of queries and keys are multiplied by; `window` is how many tokens a token attends to,
    itself included, None for all. `rotary` is which of the program's tables turns queries and keys, None for none;
    sinks: float32 [heads].
    """

    first: Norm | None
    qkv: tuple[Matrix, ...]
    output: Matrix
    second: Norm | None
    mlp: Mlp | Mixture
    scale: float
    window: int | None
    rotary: int | None = None
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    sinks: "torch.Tensor | None" = None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None


def block_matrices(block: Block) -> Iterator[Matrix]:
    """All matrices of a block."""
    yield from (*block.qkv, block.output)
    mlp = block.mlp
    if isinstance(mlp, Mlp):
        yield from (matrix for matrix in (mlp.gate, mlp.up, mlp.down) if matrix is not None)
        return
    yield from (mlp.router, *((mlp.shared_gate,) if mlp.shared_gate else ()))
    for expert in (*mlp.experts, *((mlp.shared,) if mlp.shared else ())):
        yield from (*expert.up, expert.down)


@dataclass(frozen=True)
class Program:
    """A whole decoder.

    embedding: [vocabulary, width], the head itself where they are tied; positions: [context, width], whose rows are
    added to the embeddings of the tokens at each position, or None. Each of `rotaries` gives for a length the cosines
    and sines, float32 [length, rotary_size / 2], by which pairs of the first `rotary_size` numbers of a head's queries
    and keys are turned: (i, i + rotary_size / 2), or (2 i, 2 i + 1) with `neighbours`. The outputs of a block's qkv are
    all queries, then keys, then values; `by_groups`: the queries of the heads that share a key, that and their value,
    for one such group after the other.
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
    rotaries: tuple[Callable[[int], RotaryTable], ...]
    blocks: tuple[Block, ...]
    final: Norm
    head: Matrix
    rotary_size: int = 0
    neighbours: bool = False
    by_groups: bool = False
    parallel: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None

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
