"""The file `golden.bin`: inputs that a device is given, and the outputs that it must reproduce bit for bit.

`OGLD`, then three little-endian numbers of 32 bits (count, bytes of an input, bytes of an output), then for each golden
input its bytes and those of its output.
"""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from optigpu.documents.manifest import LARGEST_TENSOR, MOST_GOLDEN, Golden
from optigpu.vocabulary import SpecError

MAGIC = b"OGLD"
_HEAD = struct.Struct("<4sIII")


@dataclass(frozen=True)
class GoldenPair:
    """One input of a model and its output, as bytes of int8 numbers."""

    input: bytes
    output: bytes


def golden_of(pairs: tuple[GoldenPair, ...], left_out: int = 0) -> Golden:
    """What a manifest says of them."""
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
