"""The file `golden.bin`: inputs that a device is given, and the outputs that it must reproduce bit for bit. `OGLD`,
then three little-endian numbers of 32 bits (count, bytes of an input, bytes of an output), then for each golden input
its bytes and those of its output."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.manifest import LARGEST_TENSOR, MOST_GOLDEN, Agreement, Golden, TensorFormat
from optigpu.vocabulary import SpecError

MAGIC = b"OGLD"
_HEAD = struct.Struct("<4sIII")


@dataclass(frozen=True)
class GoldenPair:
    """One input of a model and its output, as bytes of int8 numbers."""

    input: bytes
    output: bytes


def golden_of(pairs: tuple[GoldenPair, ...], left_out: int = 0) -> Golden:
    return Golden(
        count=len(pairs),
        inputs_sha256=hashlib.sha256(b"".join(pair.input for pair in pairs)).hexdigest(),
        outputs=tuple(pair.output.hex() for pair in pairs),
        left_out=left_out,
    )


def read_golden(path: Path) -> tuple[GoldenPair, ...]:
    """The pairs of a file. Raises SpecError if it is not such a file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from None
    return parse_golden(data, str(path))


def parse_golden(data: bytes, what: str) -> tuple[GoldenPair, ...]:
    """The pairs of a file's content; `what` is its name in the error's sentence."""
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise SpecError(f"{what} holds no golden vectors: it does not begin with {MAGIC.decode()}.")
    _, count, input_bytes, output_bytes = _HEAD.unpack_from(data)
    if not 1 <= count <= MOST_GOLDEN or max(input_bytes, output_bytes) > LARGEST_TENSOR:
        raise SpecError(f"{what} is damaged: it names {count} golden vectors of {input_bytes} bytes.")
    if len(data) != _HEAD.size + count * (input_bytes + output_bytes):
        raise SpecError(f"{what} is damaged: it has {len(data)} bytes, which its head does not say.")
    pair = struct.Struct(f"{input_bytes}s{output_bytes}s")
    return tuple(GoldenPair(*each) for each in pair.iter_unpack(data[_HEAD.size :]))


ONE = 1e-3
"""How far the sum of a distribution may be from 1."""


def agreement(floats: NDArray[np.float32], integers: NDArray[np.int8], output: TensorFormat) -> Agreement:
    """Both hold one row of class scores for each input: probabilities, else logits. A probability that INT8 cannot tell
    from 0 counts as half a step, so that the divergence stays finite."""
    count = len(integers)
    if floats.ndim != 2 or floats.shape[1] < 2:
        return Agreement(samples=count, reason="The output is no distribution over classes.")
    expected = floats[:count].astype(np.float64)
    if not np.isfinite(expected).all():
        return Agreement(samples=count, reason="The FP32 network answers with NaN or infinity.")
    if not np.ptp(expected, axis=0).any() and count > 1:
        return Agreement(samples=count, reason="The FP32 network answers the same to each held-out input.")
    found = (integers.astype(np.float64) - output.zero_point) * output.scale
    top1 = float(np.mean(expected.argmax(axis=1) == found.argmax(axis=1)))
    both = [expected, np.maximum(found, output.scale / 2)]
    if (expected < 0).any() or not np.allclose(expected.sum(axis=1), 1, atol=ONE):
        both = [np.exp(each - each.max(axis=1, keepdims=True)) for each in (expected, found)]
    one, other = (each / each.sum(axis=1, keepdims=True) for each in both)
    ratio = np.log(np.maximum(one, 1e-300)) - np.log(np.maximum(other, 1e-300))
    divergence = np.where(one > 0, one * ratio, 0.0).sum(axis=1)
    return Agreement(samples=count, top1=top1, kld_mean=max(0.0, float(divergence.mean())))
