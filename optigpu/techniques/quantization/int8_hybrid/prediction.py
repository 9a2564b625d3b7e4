"""What `int8_hybrid` leaves of a decoder's bytes, from the shapes alone. Imports no torch."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from optigpu.models.tensors import Matrix, Part
from optigpu.ops.layouts import int4_bytes, int8_bytes
from optigpu.vocabulary import DeviceKind

if TYPE_CHECKING:
    from optigpu.models.tensors import StoredWeights

GROUP = 32
"""Of Int4Scheme's default."""


def hybrid_bytes(weights: "StoredWeights", bits: int, device: DeviceKind, target: float) -> "StoredWeights":
    """The fewest bits for every matrix, and what the target leaves above them as one more entry of `other_bytes`."""
    four = partial(int4_bytes, device=device, group=GROUP, offsets=False, half=weights.half)
    eight = partial(int8_bytes, device=device)

    def least(outputs: int, inner: int) -> int:
        return eight(outputs, inner) if bits == 8 or inner % GROUP else four(outputs, inner)

    packed = weights.with_bytes(least, head=True)
    matrices = tuple(_table(matrix, weights, eight) for matrix in packed.matrices)
    found = packed.but(matrices=matrices)
    whole = sum(4 * _numbers(matrix, weights.tied) for matrix in weights.matrices)
    whole += 4 * (weights.other_bytes // weights.width)
    return found.but(other_bytes=found.other_bytes + max(0, int(target * whole) - found.bytes))


def _table(matrix: Matrix, weights: "StoredWeights", eight: "partial[int]") -> Matrix:
    """An embedding is int8, or the head's own table where they are tied; positions get 16 bits at the most."""
    if matrix.part is Part.EMBEDDING:
        return replace(matrix, bytes=0 if weights.tied else eight(matrix.outputs, matrix.inner))
    if matrix.part is Part.POSITIONS:
        return replace(matrix, bytes=matrix.elements * min(2, weights.width))
    return matrix


def _numbers(matrix: Matrix, tied: bool) -> int:
    """How many weights and biases all of a kind have; a tied head has none of its own."""
    if matrix.part is Part.HEAD and tied:
        return 0
    biases = matrix.outputs if matrix.bias_bytes else 0
    return matrix.count * (matrix.elements + biases)
