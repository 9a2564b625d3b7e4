"""The tensors of a decoder by their shapes, with the bytes that each takes: known without loading the model, or torch.

A model begins with every tensor in one dtype; techniques say what their hooks make of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from optigpu.documents.shapes import ModelFacts
from optigpu.models.families import Passes
from optigpu.models.reference import ModelReference
from optigpu.vocabulary import Frozen

_FLOAT = 4


class Part(StrEnum):
    """What a matrix is: a linear layer, the head, or a table whose rows are looked up."""

    LINEAR = "linear"
    HEAD = "head"
    EMBEDDING = "embedding"
    POSITIONS = "positions"


class MatrixShape(Frozen):
    """`count` equal matrices [outputs, inner] of a loaded model, each with a bias or without."""

    name: str
    part: Part
    outputs: int
    inner: int
    count: int
    bias: bool


class LayerCache(Frozen):
    """What each of `count` equal layers keeps of a token, for each of `kv_heads`, in numbers.

    `window` is how many tokens it reaches back, its own included; None: all of them.
    """

    window: int | None
    kv_heads: int
    key_size: int
    value_size: int
    count: int


class Description(Frozen):
    """What a decoder is made of, in any dtype.

    `numbers` are those beside the matrices in the model's dtype, such as norms; `fixed_bytes` those in a dtype of their
    own, such as the tables of a rotary embedding. `caches` is None where a layer keeps something else than keys and
    values, or what it keeps cannot be told without numbers.
    """

    facts: ModelFacts
    parameters: int
    matrices: tuple[MatrixShape, ...]
    numbers: int
    fixed_bytes: int
    caches: tuple[LayerCache, ...] | None


@dataclass(frozen=True)
class Matrix:
    """`count` equal matrices [outputs, inner]; `bytes` and `bias_bytes` are those of one as it is stored.

    A head that is tied to the embedding takes no bytes of its own until a technique makes a copy of it.
    """

    name: str
    part: Part
    outputs: int
    inner: int
    count: int
    bytes: int
    bias_bytes: int = 0

    @property
    def elements(self) -> int:
        """Of one."""
        return self.outputs * self.inner

    @property
    def whole(self) -> int:
        """Bytes of all of them with their biases."""
        return self.count * (self.bytes + self.bias_bytes)


@dataclass(frozen=True)
class OwnPasses:
    """What an operator holds that runs whole passes in the place of transformers, with a cache of its own.

    `token_bytes` are those of a token's keys and values in all blocks; there is room for multiples of `at_once` tokens.
    `angle_bytes` are a position's sines and cosines, `made_angle_bytes` what is held of them while they are computed.
    A prompt goes through in parts of `most_rows` tokens of all sequences, with `row_bytes` of activations each.
    """

    token_bytes: int
    at_once: int
    angle_bytes: int
    made_angle_bytes: int
    row_bytes: int
    most_rows: int


@dataclass(frozen=True)
class StoredWeights:
    """A decoder's tensors. `width` is that of the dtype that it was loaded in, `half` whether that is bfloat16.

    `other_bytes` are norms, of which `norm_bytes`, and the tables of rotary embeddings. `tied` says that head and
    embedding share a matrix. `widened_bytes` is the largest matrix that a layer widens for a product and holds beside
    its own numbers, `sum_bytes` what it holds for each number of its output before that has its dtype. `own_passes` is
    None where transformers runs the model.
    """

    facts: ModelFacts
    matrices: tuple[Matrix, ...]
    other_bytes: int
    norm_bytes: int
    width: int
    half: bool
    tied: bool
    widened_bytes: int = 0
    sum_bytes: int = 0
    own_passes: OwnPasses | None = None

    @property
    def bytes(self) -> int:
        """All of them, what is shared once."""
        return sum(matrix.whole for matrix in self.matrices) + self.other_bytes

    @property
    def linear(self) -> tuple[Matrix, ...]:
        """The layers of the blocks."""
        return tuple(matrix for matrix in self.matrices if matrix.part is Part.LINEAR)

    def with_bytes(
        self,
        of: Callable[[int, int], int],
        *,
        head: bool,
        float_bias: bool = True,
    ) -> "StoredWeights":
        """A copy whose linear layers, and head where that is said, take `of(outputs, inner)` bytes.

        Layers that add their bias in float32 keep a copy of it.
        """
        wanted = (Part.LINEAR, Part.HEAD) if head else (Part.LINEAR,)
        changed = (_quantized(each, of, float_bias, self.width) if each.part in wanted else each
                   for each in self.matrices)  # fmt: skip
        return replace(self, matrices=tuple(changed))

    def but(self, **changes: Any) -> "StoredWeights":
        """A copy with changes."""
        return replace(self, **changes)


def _quantized(matrix: Matrix, of: Callable[[int, int], int], float_bias: bool, width: int) -> Matrix:
    bias = matrix.bias_bytes // width * _FLOAT if float_bias else matrix.bias_bytes
    return replace(matrix, bytes=of(matrix.outputs, matrix.inner), bias_bytes=bias)


@dataclass(frozen=True)
class DecoderShape:
    """A decoder as a predictor of its memory sees it.

    `caches` are those of its description, and `passes` is what the table of families says of its forward passes.
    """

    reference: ModelReference
    description: Description
    caches: tuple[LayerCache, ...]
    passes: Passes

    @property
    def facts(self) -> ModelFacts:
        """Its shapes."""
        return self.description.facts

    @property
    def learns_positions(self) -> bool:
        """Whether it has an embedding of positions."""
        return any(matrix.part is Part.POSITIONS for matrix in self.description.matrices)

    @property
    def inner_size(self) -> int:
        """The width of the MLP's inner layer: nothing in a block has more inputs than what leads out of it."""
        linear = (matrix.inner for matrix in self.description.matrices if matrix.part is Part.LINEAR)
        return self.facts.inner_size or max(linear)

    def stored(self, width: int, *, half: bool = False) -> StoredWeights:
        """The weights as they are loaded, in a dtype of `width` bytes."""
        found, tied = self.description, self.facts.tied_head
        return StoredWeights(
            facts=found.facts,
            matrices=tuple(_loaded(matrix, width, tied) for matrix in found.matrices),
            other_bytes=width * found.numbers + found.fixed_bytes,
            norm_bytes=width * found.numbers,
            width=width,
            half=half,
            tied=tied,
        )


def _loaded(matrix: MatrixShape, width: int, tied: bool) -> Matrix:
    """A tied head's numbers are the embedding's."""
    own = 0 if matrix.part is Part.HEAD and tied else width * matrix.outputs * matrix.inner
    bias = width * matrix.outputs if matrix.bias else 0
    return Matrix(matrix.name, matrix.part, matrix.outputs, matrix.inner, matrix.count, own, bias)
