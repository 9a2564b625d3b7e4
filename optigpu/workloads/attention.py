"""attention: standard against fused attention over the length of the sequence, in time and in memory."""

import math
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from optigpu.backends.operators import AttentionRow, AttentionShape, OperatorRuntime, Wide
from optigpu.workloads.base import OperatorShape
from optigpu.workloads.requests import (
    DTYPE_UNDERFLOW,
    FLOAT32_ROUNDOFF,
    ROUNDING,
    WIDTHS,
    Dtype,
    Implemented,
    OperatorRequest,
    checked_rows,
    largest,
    require_memory,
)

Length = Annotated[int, Field(ge=1, le=131072)]


class Attention(Implemented):
    """Scaled dot-product attention over random queries, keys and values, for each implementation and length.

    "standard" is two matrix products with a softmax between them, which keeps every score in memory: PyTorch's own
    definition of scaled_dot_product_attention. "fused" is that function where it runs as one kernel (Dao et al.,
    FlashAttention, 2022, arXiv:2205.14135). `kv_heads` below `heads` (null: as many) are shared by groups of queries.
    """

    summary: ClassVar[str] = "standard against fused attention over the sequence's length, in time and memory"
    primary: ClassVar[str] = "tflops"
    metrics: ClassVar[tuple[str, ...]] = ("latency_s", "tflops")
    lists: ClassVar[tuple[str, ...]] = ("lengths", "implementations")

    kind: Literal["attention"] = "attention"
    lengths: tuple[Length, ...] = Field(
        (512, 1024, 2048, 4096, 8192),
        min_length=1,
        max_length=16,
        description="Lengths of the sequences in tokens.",
    )
    batch_size: int = Field(1, ge=1, le=1024, description="How many sequences at once.")
    heads: int = Field(12, ge=1, le=1024, description="How many query heads.")
    kv_heads: int | None = Field(
        None, ge=1, le=1024, description="How many key and value heads; by default as many as query heads."
    )
    head_size: int = Field(64, ge=8, le=256, description="How many numbers the vectors of a head have.")
    causal: bool = Field(True, description="Whether a token attends only to itself and the tokens before it.")
    dtype: Dtype = Field("float32", description="Dtype of the inputs.")

    @model_validator(mode="after")
    def _shared_evenly(self) -> Self:
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError("heads must be a multiple of kv_heads, so that each of those serves as many")
        return self

    @property
    def label(self) -> str:
        return f"{'/'.join(self.implementations)} {'/'.join(map(str, self.lengths))}"

    @property
    def flops(self) -> float:
        """Operations of the two products for the pairs that count; a multiplication and an addition are two."""
        (length,) = self.lengths
        # Pairs of a query and a key that count, of one head: where it is causal, a query sees none after it.
        pairs = length * (length + 1) / 2 if self.causal else float(length**2)
        return 4 * self.batch_size * self.heads * self.head_size * pairs

    @property
    def shape(self) -> AttentionShape:
        (length,) = self.lengths
        return AttentionShape(
            length=length,
            batch_size=self.batch_size,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_size=self.head_size,
            causal=self.causal,
            dtype=self.dtype,
            fused=self.implementation == "fused",
        )

    @property
    def work_shape(self) -> OperatorShape:
        """Queries, keys and values are read and the result is written once; scores need not be in memory at all."""
        (length,) = self.lengths
        heads = 2 * self.heads + 2 * (self.kv_heads or self.heads)
        moved = self.batch_size * heads * length * self.head_size * WIDTHS[self.dtype]
        return OperatorShape(
            "attention", self.dtype, moved, units=self.flops / 1e12, attention_flops=self.flops
        )

    def prepare(self, runtime: OperatorRuntime) -> "AttentionRequest":
        """Draws queries, keys and values from the runtime's seed. Raises UnsupportedError where they and the scores do
        not fit the free memory, and where no fused kernel takes these shapes."""
        return AttentionRequest(runtime, self)


class AttentionRequest(OperatorRequest):
    """Equal calls."""

    noun: ClassVar[str] = "attention"

    def __init__(self, runtime: OperatorRuntime, workload: Attention) -> None:
        shape = workload.shape
        name = "fused" if shape.fused else "standard"
        require_memory(
            runtime, needed_bytes(shape), f"the arrays of {name} attention over {shape.length} tokens"
        )
        self._runtime, self._shape = runtime, shape
        self.operator = runtime.attention(shape)
        super().__init__(runtime, self.operator, workload.flops)

    def observe(self) -> None:
        self._runtime.notes.record(attention_kernels=self.operator.kernels())

    def error_over_bound(self) -> float:
        shape = self._shape
        places = [
            (place // (shape.heads * shape.length), place // shape.length % shape.heads, place % shape.length)
            for place in checked_rows(shape.batch_size * shape.heads * shape.length)
        ]
        return largest(*(row_error_over_bound(row, shape) for row in self.operator.rows(places)))


def row_error_over_bound(row: AttentionRow, shape: AttentionShape) -> Wide:
    """Each element's error over what rounding explains, [head_size].

    With u = 2^-24 for sums in float32 and v the rounding of the dtype, a score s is off by at most
    e = d u |q||k| / sqrt(d) + 3 v |s|, a weight of the softmax by the factor exp(2 e), and the sums by n u (Higham,
    Accuracy and Stability of Numerical Algorithms, 2002, sections 3.1 and 3.5); a result is rounded to the dtype.
    """
    rounding, least = ROUNDING[shape.dtype], DTYPE_UNDERFLOW[shape.dtype]
    scores = row.keys @ row.query * shape.scale
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    size = np.abs(row.keys) @ np.abs(row.query) * shape.scale
    score = (
        float((shape.head_size * FLOAT32_ROUNDOFF * size + 3 * rounding * np.abs(scores)).max()) + 2 * least
    )
    expected = weights @ row.values
    slack = math.expm1(2 * score) + 2 * len(row.keys) * FLOAT32_ROUNDOFF + 3 * rounding
    bound = slack * (weights @ np.abs(row.values)) + rounding * np.abs(expected)
    bound += least * (1 + np.abs(row.values).sum(axis=0))
    error: Wide = np.abs(row.result - expected) / bound
    return error


def needed_bytes(shape: AttentionShape) -> int:
    """Bytes of the tensors, and for the standard implementation of two matrices of scores and the mask."""
    width = WIDTHS[shape.dtype]
    rows = shape.batch_size * shape.length * shape.head_size * width
    fused = rows * (2 * shape.heads + 2 * shape.kv_heads)
    if shape.fused:
        return fused
    repeated = 2 * rows * shape.heads if shape.group > 1 else 0
    scores = 2 * shape.batch_size * shape.heads * shape.length**2 * width
    return fused + repeated + scores + (2 * shape.length**2 if shape.causal else 0)
