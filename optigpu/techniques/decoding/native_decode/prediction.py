"""What `native_decode` makes of a decoder's bytes, and what its operator holds, from the shapes alone.

Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from optigpu.models.families import family_of
from optigpu.models.tensors import Matrix, OwnPasses, Part
from optigpu.ops.decode.program import CacheKind, WeightKind
from optigpu.ops.layouts import DECODE_TILE, KV_SCALE_BYTES, decode_bytes
from optigpu.vocabulary import DeviceKind

if TYPE_CHECKING:
    from optigpu.documents.shapes import ModelFacts
    from optigpu.models.tensors import StoredWeights

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


def packed_weights(weights: "StoredWeights", layout: Layout, device: DeviceKind) -> "StoredWeights":
    """Packed matrices with a head of their own, a bfloat16 embedding, and float32 copies of what came in 16 bits.

    Which layers get the extra bytes depends on the weights, so that the sum may be below by less than a layer.
    """
    matrices = tuple(_stored(matrix, weights, layout, device) for matrix in weights.matrices)
    copies = 0 if weights.width == FLOAT else weights.norm_bytes // weights.width * FLOAT
    least = sum(matrix.count * matrix.bytes for matrix in _linear(matrices))
    most = sum(matrix.count * matrix.bytes for matrix in _linear(_raised(matrices, layout, device)))
    extra = min(int(layout.extra_bytes * least), most - least)
    widest = max(matrix.elements for matrix in weights.linear)
    return weights.but(
        matrices=matrices,
        other_bytes=weights.other_bytes + copies + extra,
        widened_bytes=WIDENED * widest if device is DeviceKind.CUDA and layout.weights != "bf16" else 0,
        own_passes=_passes(weights.facts, layout, device),
    )


def _stored(matrix: Matrix, weights: "StoredWeights", layout: Layout, device: DeviceKind) -> Matrix:
    if matrix.part is Part.EMBEDDING:
        return replace(matrix, bytes=HALF * matrix.elements)
    if matrix.part is Part.POSITIONS:
        copy = 0 if weights.width == FLOAT else FLOAT * weights.facts.context * matrix.inner
        return replace(matrix, bytes=matrix.bytes + copy)
    outputs = matrix.outputs
    if device is DeviceKind.CPU:
        outputs = -(-outputs // DECODE_TILE) * DECODE_TILE
    return replace(
        matrix,
        bytes=_packed(matrix, layout.kind(matrix.part), layout, device),
        bias_bytes=FLOAT * outputs if matrix.bias_bytes else 0,
    )


def _raised(matrices: tuple[Matrix, ...], layout: Layout, device: DeviceKind) -> Iterator[Matrix]:
    """With 8 bits where there are 4."""
    for matrix in _linear(matrices):
        is_raised = layout.kind(matrix.part) == "w4"
        yield replace(matrix, bytes=_packed(matrix, "w8", layout, device)) if is_raised else matrix


def _packed(matrix: Matrix, kind: WeightKind, layout: Layout, device: DeviceKind) -> int:
    return decode_bytes(matrix.outputs, matrix.inner, device, kind=kind, group=layout.group)


def _linear(matrices: Iterator[Matrix] | tuple[Matrix, ...]) -> Iterator[Matrix]:
    return (matrix for matrix in matrices if matrix.part in (Part.LINEAR, Part.HEAD))


def _passes(facts: "ModelFacts", layout: Layout, device: DeviceKind) -> OwnPasses:
    head, is_cpu = facts.head_size, device is DeviceKind.CPU
    values = -(-head // CACHE_TILE) * CACHE_TILE if is_cpu else head
    numbers = (head + values) * (HALF if layout.kv == "bf16" else 1)
    scales = 2 * KV_SCALE_BYTES if layout.kv == "int8" else 0
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
