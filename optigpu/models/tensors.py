"""The tensors of a decoder by their shapes, with the bytes that each takes: known without loading the model, or torch.

A model begins with every tensor in one dtype; techniques say what their hooks make of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from optigpu.documents.shapes import ModelFacts
from optigpu.models.facts import config_of, facts_from_config
from optigpu.models.families import ModelFamily, SmallTensors, family_of
from optigpu.models.reference import ModelReference
from optigpu.vocabulary import UnsupportedError

_FLOAT = 4


class Part(StrEnum):
    """What a matrix is: a linear layer of a block, the head, or a table whose rows are looked up."""

    LINEAR = "linear"
    HEAD = "head"
    EMBEDDING = "embedding"
    POSITIONS = "positions"


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
    """A decoder as a predictor of its memory sees it. `window` is how many tokens its own attention reaches back."""

    reference: ModelReference
    facts: ModelFacts
    small: SmallTensors
    window: int | None
    config: Mapping[str, Any]

    @property
    def family(self) -> ModelFamily:
        """What the table of families says of it."""
        return family_of(self.facts.family)

    def stored(self, width: int, *, half: bool = False) -> StoredWeights:
        """The weights as they are loaded, in a dtype of `width` bytes."""
        return StoredWeights(
            facts=self.facts,
            matrices=tuple(self._matrices(width)),
            other_bytes=width * self._norm_numbers() + self._rotary_bytes(),
            norm_bytes=width * self._norm_numbers(),
            width=width,
            half=half,
            tied=self.facts.tied_head,
        )

    def _matrices(self, width: int) -> Iterator[Matrix]:
        facts, blocks = self.facts, self.facts.layers
        rows, wide = facts.vocabulary, facts.embedding_size
        yield Matrix("embedding", Part.EMBEDDING, rows, wide, 1, width * rows * wide)
        if self.family.learns_positions:
            places = facts.context + self.small.more_positions
            yield Matrix(
                "positions", Part.POSITIONS, places, facts.hidden_size, 1, width * places * facts.hidden_size
            )
        for name, outputs, inner in self._linear_shapes():
            bias = width * outputs if name.partition(".")[0] in self.small.biases else 0
            yield Matrix(name, Part.LINEAR, outputs, inner, blocks, width * outputs * inner, bias)
        bias = width * rows if "head" in self.small.biases else 0
        own = 0 if facts.tied_head else width * rows * wide
        yield Matrix("head", Part.HEAD, rows, wide, 1, own, bias)

    def _linear_shapes(self) -> Iterator[tuple[str, int, int]]:
        """Name, outputs and inputs of the layers of one block; those of separate queries, keys and values as qkv.*."""
        facts, attention = self.facts, self.family.attention
        queries, keys = facts.heads * facts.head_size, facts.kv_heads * facts.head_size
        inner = facts.inner_size or 4 * facts.hidden_size
        if attention and len(attention.qkv) == 1:
            yield "qkv", queries + 2 * keys, facts.hidden_size
        else:
            yield "qkv.q", queries, facts.hidden_size
            yield "qkv.k", keys, facts.hidden_size
            yield "qkv.v", keys, facts.hidden_size
        yield "output", facts.hidden_size, queries
        if facts.gated_mlp:
            yield "gate", inner, facts.hidden_size
        yield "up", inner, facts.hidden_size
        yield "down", facts.hidden_size, inner

    def _norm_numbers(self) -> int:
        """Of all blocks' norms and of the last one."""
        vectors = self.small.norms * self.facts.layers + 1
        return vectors * self.small.norm_vectors * self.facts.hidden_size

    def _rotary_bytes(self) -> int:
        """The frequencies and their copy, or each block's sines and cosines of every position; always float32."""
        facts = self.facts
        if self.small.rotary == "model":
            return 2 * _FLOAT * (facts.head_size // 2)
        if self.small.rotary == "blocks":
            size = self.config.get("rotary_dim") or facts.hidden_size
            return _FLOAT * facts.layers * facts.context * size
        return 0


def decoder_shape(reference: ModelReference) -> DecoderShape:
    """The shape of a decoder from its configuration: of a preset, a bundled model, a folder, the hub's cache.

    Raises UnsupportedError where there is none here, for an image classifier, and for a family whose tensors are not
    known.
    """
    name, config = config_of(reference)
    small = family_of(name).small
    if small is None:
        raise UnsupportedError(
            f"The memory of {reference} cannot be predicted: the tensors of {name} models are not in the table of "
            "families. Measure it with `optigpu run`."
        )
    facts = facts_from_config(name, config)
    sliding = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if facts.embedding_size != facts.hidden_size:
        raise UnsupportedError(
            f"The memory of {reference} cannot be predicted: its embedding is projected to another width. Measure it "
            "with `optigpu run`."
        )
    return DecoderShape(reference, facts, small, sliding, config)
