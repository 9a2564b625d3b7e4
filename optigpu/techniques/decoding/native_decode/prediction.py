"""What `native_decode` makes of a decoder's bytes, and what its operator holds, from the shapes alone.

Imports no torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from optigpu.models.families import family_of
from optigpu.models.tensors import Matrix, OwnPasses, Part
from optigpu.ops.decode.program import FEW_BITS, CacheKind, WeightKind
from optigpu.ops.layouts import DECODE_TILE, KV_SCALE_BYTES, decode_bytes, finer_bytes, kv_bytes
from optigpu.vocabulary import DeviceKind

if TYPE_CHECKING:
    from optigpu.documents.shapes import ModelFacts
    from optigpu.models.tensors import StoredWeights

Calibration = Literal["self", "sequential", "none"]
CACHE_TILE = 16
"""On a CPU room for keys comes in so many tokens, and a token's values are padded to so many; cpu/cache.py."""
ANGLE_COPIES = 9
"""Angles of a position while its sines and cosines are computed, each as many as half a head: frequencies once, and
twice each the angles, their cosines, their sines, and one of these before it is scaled."""
MOST_ROWS = 512
"""Tokens of all sequences that a pass on CUDA takes at once; ROWS_AT_ONCE in cuda/prefill.py."""
WIDENED = 10
"""Bytes of a quantized weight while a prompt's product on CUDA widens it: two float32 numbers and a bfloat16 one."""
FLOAT, HALF = 4, 2
RAISED: Mapping[WeightKind, WeightKind] = {"w3k": "w4k", "w4": "w8"}
"""What extra bytes are for: the kind that a layer of the first kind has then."""
FINER_UNIT = 16
"""Rows of a block on a CPU, which is filled up otherwise."""


@dataclass(frozen=True)
class Layout:
    """How native_decode stores weights and cache, by its parameters of the same names."""

    weights: WeightKind
    group: int
    head: Literal["same", "w8", "bf16"]
    extra_bytes: float
    kv: CacheKind

    def kind(self, part: Part) -> WeightKind:
        """Of a linear layer's weights without extra bytes."""
        return self.head if part is Part.HEAD and self.head != "same" else self.weights

    @property
    def tables(self) -> WeightKind:
        """Of positions, and of an embedding that is not the head's."""
        return "bf16" if self.weights == "bf16" else "w8"


def finer_rows(vocabulary: int) -> int:
    """How many rows of a tied table of 3 or 4 bits are rounded twice.

    Those of frequent tokens. By Zipf's law so many are about the same share of a text for every size of vocabulary.
    """
    return min(vocabulary, FINER_UNIT * math.ceil(math.pow(vocabulary, 2 / 3) / FINER_UNIT))


def packed_weights(weights: "StoredWeights", layout: Layout, device: DeviceKind) -> "StoredWeights":
    """Packed matrices and tables, of which a tied head and embedding share one, and float32 copies of norms of 16 bits.

    Which layers get the extra bytes depends on the weights, so that the sum may be below by less than a layer.
    """
    matrices = tuple(_stored(matrix, weights, layout, device) for matrix in weights.matrices)
    copies = 0 if weights.width == FLOAT else weights.norm_bytes // weights.width * FLOAT
    least = sum(matrix.count * matrix.bytes for matrix in _linear(matrices))
    most = sum(matrix.count * matrix.bytes for matrix in _raised(matrices, weights, layout, device))
    extra = min(int(layout.extra_bytes * least), most - least)
    widest = max(matrix.elements for matrix in weights.linear)
    return weights.but(
        matrices=matrices,
        other_bytes=weights.other_bytes + copies + extra,
        widened_bytes=WIDENED * widest if device is DeviceKind.CUDA and layout.weights != "bf16" else 0,
        own_passes=_passes(weights.facts, layout, device),
    )


def _stored(matrix: Matrix, weights: "StoredWeights", layout: Layout, device: DeviceKind) -> Matrix:
    if matrix.part is Part.EMBEDDING and weights.tied:
        return replace(matrix, bytes=0)
    if matrix.part is Part.EMBEDDING:
        return replace(matrix, bytes=_packed(matrix, layout.tables, layout, device))
    if matrix.part is Part.POSITIONS:
        used = replace(matrix, outputs=weights.facts.longest)
        return replace(matrix, bytes=_packed(used, layout.tables, layout, device))
    outputs, kind = matrix.outputs, layout.kind(matrix.part)
    if device is DeviceKind.CPU:
        outputs = -(-outputs // DECODE_TILE) * DECODE_TILE
    size = _linear_bytes(matrix, kind, weights, layout, device)
    return replace(matrix, bytes=size, bias_bytes=FLOAT * outputs if matrix.bias_bytes else 0)


def _raised(
    matrices: tuple[Matrix, ...], weights: "StoredWeights", layout: Layout, device: DeviceKind
) -> Iterator[Matrix]:
    """The linear ones, each of the kind that extra bytes are for."""
    for matrix in _linear(matrices):
        kind = layout.kind(matrix.part)
        yield replace(matrix, bytes=_linear_bytes(matrix, RAISED.get(kind, kind), weights, layout, device))


def _linear_bytes(
    matrix: Matrix, kind: WeightKind, weights: "StoredWeights", layout: Layout, device: DeviceKind
) -> int:
    """With the finer rows of a tied head."""
    size = _packed(matrix, kind, layout, device)
    if matrix.part is Part.HEAD and weights.tied and kind in FEW_BITS:
        size += finer_bytes(finer_rows(matrix.outputs), matrix.inner, device, kind=kind, group=layout.group)
    return size


def _packed(matrix: Matrix, kind: WeightKind, layout: Layout, device: DeviceKind) -> int:
    return decode_bytes(matrix.outputs, matrix.inner, device, kind=kind, group=layout.group)


def _linear(matrices: Iterator[Matrix] | tuple[Matrix, ...]) -> Iterator[Matrix]:
    return (matrix for matrix in matrices if matrix.part in (Part.LINEAR, Part.HEAD))


def _passes(facts: "ModelFacts", layout: Layout, device: DeviceKind) -> OwnPasses:
    head, is_cpu = facts.head_size, device is DeviceKind.CPU
    numbers = sum(kv_bytes(layout.kv, head)) if is_cpu else 2 * head * (HALF if layout.kv == "bf16" else 1)
    scales = 0 if layout.kv == "bf16" else 2 * KV_SCALE_BYTES
    half_angles = 0 if family_of(facts.family).learns_positions else FLOAT * (head // 2)
    # What the C++ operator has for a pass is its own, some MB at the most; on CUDA a prompt goes through torch.
    row = 0 if is_cpu else FLOAT * (4 * facts.hidden_size + 4 * (facts.inner_size or 4 * facts.hidden_size))
    return OwnPasses(
        token_bytes=facts.layers * facts.kv_heads * (numbers + scales),
        at_once=CACHE_TILE if is_cpu else 1,
        angle_bytes=2 * half_angles,
        made_angle_bytes=ANGLE_COPIES * half_angles,
        row_bytes=row,
        most_rows=MOST_ROWS,
    )
