"""The tensors of a decoder by their shapes, with the bytes that each takes: known without a loaded model or torch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from optigpu.documents.facts import ModelFacts
from optigpu.models.families import Passes
from optigpu.models.reference import ModelReference
from optigpu.vocabulary import Changeable, Frozen

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
    """What each of `count` equal layers keeps of a token for each of `kv_heads`; `window`: tokens it reaches back."""

    window: int | None
    kv_heads: int
    key_size: int
    value_size: int
    count: int


class Description(Frozen):
    """What a decoder is made of, in any dtype.

    `numbers` are those beside the matrices in the model's dtype (norms), `fixed_bytes` those in one of their own
    (rotary tables). `caches` is None where a layer keeps other things than keys and values, or it cannot be told.
    """

    facts: ModelFacts
    parameters: int
    matrices: tuple[MatrixShape, ...]
    numbers: int
    fixed_bytes: int
    caches: tuple[LayerCache, ...] | None


@dataclass(frozen=True)
class Matrix:
    """As MatrixShape, with the bytes of one as it is stored: 0 for a tied head until a technique copies it."""

    name: str
    part: Part
    outputs: int
    inner: int
    count: int
    bytes: int
    bias_bytes: int = 0

    @property
    def elements(self) -> int:
        return self.outputs * self.inner

    @property
    def whole(self) -> int:
        """Bytes of all with their biases."""
        return self.count * (self.bytes + self.bias_bytes)


@dataclass(frozen=True)
class OwnPasses:
    """What an operator holds that runs whole passes in the place of transformers, with a cache of its own.

    `token_bytes` of a token's keys and values in all blocks, in multiples of `at_once` tokens; `angle_bytes` of a
    position's sines and cosines, `made_angle_bytes` while they are computed; prompts go in parts of `most_rows` tokens
    of all sequences, with `row_bytes` of activations each.
    """

    token_bytes: int
    at_once: int
    angle_bytes: int
    made_angle_bytes: int
    row_bytes: int
    most_rows: int


@dataclass(frozen=True)
class StoredWeights(Changeable):
    """A decoder's tensors. `width` is that of the dtype that it was loaded in, `half` whether that is bfloat16.

    `other_bytes` are norms (`norm_bytes`) and the tables of rotary embeddings; `tied`: head and embedding share a
    matrix; `widened_bytes`: the largest matrix that a layer widens for a product; `sum_bytes`: what it holds for each
    number of its output before that has its dtype; `own_passes`: None where transformers runs the model.
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
        return sum(matrix.whole for matrix in self.matrices) + self.other_bytes

    @property
    def linear(self) -> tuple[Matrix, ...]:
        """The layers of the blocks."""
        return tuple(matrix for matrix in self.matrices if matrix.part is Part.LINEAR)

    def with_bytes(
        self, of: Callable[[int, int], int], *, head: bool, float_bias: bool = True
    ) -> "StoredWeights":
        """A copy whose linear layers, and head if asked, take `of(outputs, inner)` bytes; `float_bias`: of float32."""
        wanted = (Part.LINEAR, Part.HEAD) if head else (Part.LINEAR,)

        def quantized(each: Matrix) -> Matrix:
            bias = each.bias_bytes // self.width * _FLOAT if float_bias else each.bias_bytes
            return replace(each, bytes=of(each.outputs, each.inner), bias_bytes=bias)

        changed = (quantized(each) if each.part in wanted else each for each in self.matrices)
        return replace(self, matrices=tuple(changed))


@dataclass(frozen=True)
class DecoderShape:
    reference: ModelReference
    description: Description
    caches: tuple[LayerCache, ...]
    passes: Passes

    @property
    def facts(self) -> ModelFacts:
        return self.description.facts

    @property
    def learns_positions(self) -> bool:
        return any(matrix.part is Part.POSITIONS for matrix in self.description.matrices)

    @property
    def inner_size(self) -> int:
        """The width of the MLP's inner layer: nothing in a block has more inputs than what leads out of it."""
        linear = (matrix.inner for matrix in self.description.matrices if matrix.part is Part.LINEAR)
        return self.facts.inner_size or max(linear)

    def stored(self, width: int, *, half: bool = False) -> StoredWeights:
        found, tied = self.description, self.facts.tied_head

        def loaded(shape: MatrixShape) -> Matrix:
            own = 0 if shape.part is Part.HEAD and tied else width * shape.outputs * shape.inner
            bias = width * shape.outputs if shape.bias else 0
            return Matrix(shape.name, shape.part, shape.outputs, shape.inner, shape.count, own, bias)

        return StoredWeights(
            facts=found.facts,
            matrices=tuple(loaded(matrix) for matrix in found.matrices),
            other_bytes=width * found.numbers + found.fixed_bytes,
            norm_bytes=width * found.numbers,
            width=width,
            half=half,
            tied=tied,
        )
