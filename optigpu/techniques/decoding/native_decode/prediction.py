"""What the operator runs, and what `native_decode` makes of a decoder's bytes, from shapes alone. Imports no torch."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.models.described import Matrix, OwnPasses, Part, StoredWeights
from optigpu.ops.decode.program import FEW_BITS, MOST_HEAD_SIZE, CacheKind, WeightKind
from optigpu.ops.layouts import DECODE_TILE, KV_SCALE_BYTES, decode_bytes, finer_bytes, kv_bytes
from optigpu.techniques.decoding.native_decode.families import ROLES
from optigpu.vocabulary import DeviceKind

Calibration = Literal["self", "sequential", "none"]
Weights = Literal["auto", WeightKind]
MAX_KLD = 0.02
"""The divergence that weights "auto" stay within by default, in nats for each token."""
EXPECTED_KIND: WeightKind = "w6"
"""The kind whose bytes "auto" is expected to take: alone it is the smallest within 0.02 nat of SmolLM2-135M and Gemma
3 270M.
"""
CACHE_TILE = 16
"""On a CPU room for keys comes in so many tokens, and a token's values are padded to so many; cpu/cache.py."""
ANGLE_COPIES = 9
"""Angles of a position while its sines and cosines are computed, each as many as half a head: frequencies once, and
twice each the angles, their cosines, their sines, and one of these before it is scaled."""
MOST_ROWS = 512
"""Tokens of all sequences that a pass on CUDA takes at once; ROWS_AT_ONCE in cuda/decoder.py."""
WIDENED = 10
"""Bytes of a quantized weight while a prompt's product on CUDA widens it: two float32 numbers and a bfloat16 one."""
FLOAT, HALF = 4, 2
RAISED: Mapping[WeightKind, tuple[WeightKind, ...]] = {
    "w3k": ("w4k", "w5", "w6", "w8"),
    "w4": ("w5", "w6", "w8"),
    "w4k": ("w5", "w6", "w8"),
    "w5": ("w6", "w8"),
    "w6": ("w8",),
}
"""What extra bytes are for: the kinds that a layer of the first kind may have then, fewest bits first."""
FINER_UNIT = 16
"""Rows of a block on a CPU, which is filled up otherwise."""


@dataclass(frozen=True)
class PackingOptions:
    """The options of packing: the parameters of `native_decode` of the same names."""

    weights: Weights
    group: int
    head: Literal["same", "w8", "bf16"]
    extra_bytes: float
    calibration: Calibration
    max_kld: float = MAX_KLD

    @property
    def lowest(self) -> WeightKind:
        """The fewest bits that a layer may have."""
        return "w3k" if self.weights == "auto" else self.weights

    def kind(self, is_head: bool) -> WeightKind:
        """The fewest bits of a linear layer's weights."""
        return self.head if is_head and self.head != "same" else self.lowest

    @property
    def tables(self) -> WeightKind:
        """Of positions, and of an embedding that is not the head's."""
        return "bf16" if self.weights == "bf16" else "w8"


def finer_rows(vocabulary: int) -> int:
    """How many rows of a tied table of 3 to 6 bits are rounded twice.

    Those of frequent tokens. By Zipf's law so many are about the same share of a text for every size of vocabulary.
    """
    return min(vocabulary, FINER_UNIT * math.ceil(math.pow(vocabulary, 2 / 3) / FINER_UNIT))


def packed_weights(
    weights: StoredWeights, layout: PackingOptions, kv: CacheKind, device: DeviceKind
) -> StoredWeights:
    """Packed matrices and tables, of which a tied head and embedding share one, and float32 copies of norms of 16 bits.

    Which layers get the extra bytes depends on the weights, so that the sum may be below by less than a layer. With
    weights "auto" it is a guess.
    """
    copies = 0 if weights.width == FLOAT else weights.norm_bytes // weights.width * FLOAT
    if layout.weights == "auto":
        layout = replace(layout, weights=EXPECTED_KIND)
    matrices = tuple(_stored(matrix, weights, layout, device) for matrix in weights.matrices)
    least = sum(matrix.count * matrix.bytes for matrix in _linear(matrices))
    most = 0
    for matrix in _linear(matrices):
        kind = layout.kind(matrix.part is Part.HEAD)
        most += matrix.count * _linear_bytes(matrix, RAISED.get(kind, (kind,))[-1], weights, layout, device)
    extra = min(int(layout.extra_bytes * least), most - least)
    widest = max(matrix.elements for matrix in weights.linear)
    return weights.but(
        matrices=matrices,
        other_bytes=weights.other_bytes + copies + extra,
        widened_bytes=WIDENED * widest if device is DeviceKind.CUDA and layout.weights != "bf16" else 0,
        own_passes=_passes(weights.facts, kv, device),
    )


def _stored(matrix: Matrix, weights: StoredWeights, layout: PackingOptions, device: DeviceKind) -> Matrix:
    if matrix.part is Part.EMBEDDING and weights.tied:
        return replace(matrix, bytes=0)
    if matrix.part is Part.EMBEDDING:
        return replace(matrix, bytes=_packed(matrix, layout.tables, layout, device))
    if matrix.part is Part.POSITIONS:
        used = replace(matrix, outputs=weights.facts.longest)
        return replace(matrix, bytes=_packed(used, layout.tables, layout, device))
    outputs, kind = matrix.outputs, layout.kind(matrix.part is Part.HEAD)
    if device is DeviceKind.CPU:
        outputs = -(-outputs // DECODE_TILE) * DECODE_TILE
    size = _linear_bytes(matrix, kind, weights, layout, device)
    return replace(matrix, bytes=size, bias_bytes=FLOAT * outputs if matrix.bias_bytes else 0)


def _linear_bytes(
    matrix: Matrix, kind: WeightKind, weights: StoredWeights, layout: PackingOptions, device: DeviceKind
) -> int:
    """With the finer rows of a tied head."""
    size = _packed(matrix, kind, layout, device)
    if matrix.part is Part.HEAD and weights.tied and kind in FEW_BITS:
        size += finer_bytes(finer_rows(matrix.outputs), matrix.inner, device, kind=kind, group=layout.group)
    return size


def _packed(matrix: Matrix, kind: WeightKind, layout: PackingOptions, device: DeviceKind) -> int:
    return decode_bytes(matrix.outputs, matrix.inner, device, kind=kind, group=layout.group)


def _linear(matrices: tuple[Matrix, ...]) -> Iterator[Matrix]:
    return (matrix for matrix in matrices if matrix.part in (Part.LINEAR, Part.HEAD))


def _passes(facts: ModelFacts, kv: CacheKind, device: DeviceKind) -> OwnPasses:
    head, is_cpu = facts.head_size, device is DeviceKind.CPU
    numbers = sum(kv_bytes(kv, head)) if is_cpu else 2 * head * (HALF if kv == "bf16" else 1)
    scales = 0 if kv == "bf16" else 2 * KV_SCALE_BYTES
    half_angles = 0 if ROLES[facts.family].positions else FLOAT * (head // 2)
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


NORM_UNIT = 16
"""The hidden size must be a multiple of this: the operator normalizes this many numbers at once."""
HEAD_UNIT = 4
LEAVE_OUT = "leave it out of the stack"


def known_refusal(model: ModelFacts, group: int) -> str | None:
    """Why no program can be filled from a model, as far as its facts say, as a sentence's words without an end; or
    None.

    `group` is what the inputs of every matrix must be a multiple of.
    """
    if model.family not in ROLES:
        return f"supports the families {', '.join(ROLES)}, not {model.family}; {LEAVE_OUT}"
    if model.embedding_size != model.hidden_size:
        return f"does not support an embedding that is projected to another width; {LEAVE_OUT}"
    reason = other_size(model.hidden_size, model.head_size)
    if reason:
        return f"{reason}; {LEAVE_OUT}"
    inputs = {model.hidden_size, model.heads * model.head_size, model.inner_size or model.hidden_size}
    wrong = [number for number in sorted(inputs) if number % group]
    if wrong:
        return (
            f"needs layers whose inputs are a multiple of {group}; this model has layers with {wrong[0]}. Choose "
            "another group or leave it out of the stack"
        )
    return None


def other_size(hidden_size: int, head_size: int) -> str | None:
    """Why the operator cannot run a model of these sizes, or None."""
    if hidden_size % NORM_UNIT:
        return f"needs a hidden size that is a multiple of {NORM_UNIT}; this model has {hidden_size}"
    if head_size % HEAD_UNIT or head_size > MOST_HEAD_SIZE:
        return (
            f"needs a head size that is a multiple of {HEAD_UNIT} and at most {MOST_HEAD_SIZE}; this model has "
            f"{head_size}"
        )
    return None
