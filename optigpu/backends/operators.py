"""The interface for workloads that time one operator without a model. Values to be checked are numpy arrays.

The backend draws the operands on the device, from the runtime's seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import Runtime
from optigpu.documents.facts import Answers

Wide = NDArray[np.float64]
"""Numbers of any dtype, widened to be compared with a reference."""


class TimedOperator(Protocol):
    """One operator with its operands, called repeatedly."""

    def seconds(self, calls: int) -> float:
        """Seconds of that many calls, one after the other."""

    def redraw(self, seed: int) -> None:
        """Draws new operands from `seed` into the same storages: further ones might not fit."""


@dataclass(frozen=True)
class MatmulBlock:
    """Some rows [k, n] of A, as many columns [n, k] of B, and where they cross in C, [k, k]."""

    rows: Wide
    columns: Wide
    product: Wide


class MatmulOperator(TimedOperator, Protocol):
    """C = A B, square."""

    def block(self, places: Sequence[int]) -> MatmulBlock:
        """The rows and columns at these indices, of the last product."""


@dataclass(frozen=True)
class AttentionShape:
    """Scaled dot-product attention; `fused` in one kernel, else by its definition in separate operators."""

    length: int
    batch_size: int
    heads: int
    kv_heads: int
    head_size: int
    causal: bool
    dtype: str
    fused: bool

    @property
    def group(self) -> int:
        """Heads that share one head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        """The factor of the scores before the softmax."""
        return float(self.head_size**-0.5)


AttentionPlace = tuple[int, int, int]
"""A query: its sequence in the batch, its head, its index in the sequence."""


@dataclass(frozen=True)
class AttentionRow:
    """One query [head_size], the keys and values [seen, head_size] that it attends to, and the result [head_size]."""

    query: Wide
    keys: Wide
    values: Wide
    result: Wide


class AttentionOperator(TimedOperator, Protocol):
    """Attention over random queries, keys and values."""

    def kernels(self) -> list[str]:
        """The names of the attention kernels that a call runs; slow, and never timed."""

    def rows(self, places: Sequence[AttentionPlace]) -> Iterator[AttentionRow]:
        """The results of one call for these queries."""


@dataclass(frozen=True)
class NormShape:
    """The norm of `rows` rows of `width` numbers, of their sum with a residual if there is one."""

    norm: Literal["layer_norm", "rms_norm"]
    residual: bool
    width: int
    rows: int
    dtype: str
    epsilon: float
    fused: bool


@dataclass(frozen=True)
class NormRows:
    """Some rows [k, width], the weight and bias [width], the sum with the residual, and its norm, [k, width] each."""

    rows: Wide
    residual: Wide | None
    weight: Wide
    bias: Wide | None
    summed: Wide
    normed: Wide


class NormOperator(TimedOperator, Protocol):
    """A norm with its weight, and a bias if it is a layer norm."""

    def rows(self, places: Sequence[int]) -> NormRows:
        """The results of one call for these rows."""


@dataclass(frozen=True)
class DrawnInput:
    """An input that is drawn: normal numbers of a kernel's dtype, or with `below` whole numbers (int64) from 0 on."""

    shape: tuple[int, ...]
    below: int | None = None


@dataclass(frozen=True)
class KernelCall:
    """A `function` of the Python `text`, called with these arguments; with `compiled` by way of torch.compile."""

    text: str
    function: str
    arguments: tuple[DrawnInput | bool | int | float, ...]
    dtype: str
    compiled: bool


class KernelOperator(TimedOperator, Protocol):
    """A function that somebody brought. Its calls go through as many sets of inputs as no cache holds."""

    def draw(self, seed: int, calls: int) -> int:
        """Draws the inputs of the next calls, at most as many as there are sets; returns how many those are."""

    def answer(self, calls: int, file: Path, *, with_inputs: bool) -> Answers:
        """Calls it once with each of the drawn sets, and writes what it returned, as bytes; with the inputs as they are
        afterwards, if asked to. Raises OptiGPUError for what is no tensor."""

    def digest(self) -> str:
        """SHA-256 of those bytes."""


class OperatorRuntime(Runtime, Protocol):
    """The runtime of a workload without a model. Raises UnsupportedError if the engine lacks the operator."""

    def free_bytes(self) -> int:
        """Memory of the device that is free."""

    def matmul(self, size: int, dtype: str) -> MatmulOperator:
        """The product of two square matrices; `dtype` tf32 is float32 that tensor cores round."""

    def attention(self, shape: AttentionShape) -> AttentionOperator:
        """Attention of that shape."""

    def norm(self, shape: NormShape) -> NormOperator:
        """A norm of that shape."""

    def kernel(self, call: KernelCall) -> KernelOperator:
        """A function of a file. Raises OptiGPUError for a file that cannot be imported."""
