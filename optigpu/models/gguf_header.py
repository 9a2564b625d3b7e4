"""The header of a GGUF file: its numbers and names, and where its tensors lie.

Read here and not by the package gguf, which refuses the types that only ik_llama.cpp has.
Source of the format: docs/gguf.md of ggml.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE, ALIGNMENT = "general.architecture", "general.alignment"
EMBEDDING = "token_embd.weight"
_USUAL_ALIGNMENT = 32
_MOST = 2**24
"""No count and no text of a sound file is longer."""
_MOST_LAYERS = 1024
_DEEPEST = 8
"""How many arrays a sound file has within each other, at most."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
Number = int | float | bool
Value = Number | str | tuple[Number, ...]


@dataclass(frozen=True)
class Placed:
    """One tensor: `type` is its number, `shape` has the innermost dimension first, `bytes` reach to the next tensor."""

    name: str
    type: int
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass(frozen=True)
class Header:
    """`values` are the file's numbers and texts by key, and its arrays of few numbers; of others only the length."""

    values: dict[str, Value]
    tensors: tuple[Placed, ...]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of it."""
        return str(self.values.get(ARCHITECTURE, ""))

    @property
    def embedding(self) -> Placed:
        """The table of the tokens. Raises ValueError for a file that has none."""
        for tensor in self.tensors:
            if tensor.name == EMBEDDING:
                return tensor
        raise ValueError(f"it has no tensor {EMBEDDING}, so it is no model that generates text")

    def number(self, key: str, default: int | None = None) -> int:
        """A size of the architecture, such as "block_count"; `default` is that of a file which leaves it out.

        Raises ValueError where the file has none, or one that is not positive.
        """
        name = f"{self.architecture}.{key}"
        found = self.values.get(name, default)
        if isinstance(found, bool) or not isinstance(found, int):
            raise ValueError(f"it has no number {name}")
        if found < 1:
            raise ValueError(f"its {name} is {found}, which is not positive")
        return found

    def by_layer(self, key: str, layers: int, default: Sequence[int] = ()) -> tuple[int, ...]:
        """A size of each layer; a file may have one for all. `default` are those of a file that leaves it out.

        Raises ValueError for what is no whole number, or not one for each layer.
        """
        name = f"{self.architecture}.{key}"
        found = self.values.get(name)
        if found is None:
            return tuple(default)
        each = found[:layers] if isinstance(found, tuple) else (found,) * layers
        whole = tuple(number for number in each if isinstance(number, int) and number >= 0)
        if len(whole) != layers:
            raise ValueError(f"its {name} is not a whole number for each of {layers} layers")
        return whole


def read_header(path: Path) -> Header:
    """Raises ValueError for a file that is no whole GGUF file, OSError for one that cannot be read."""
    size = path.stat().st_size
    if not size:
        raise ValueError("it is empty")
    with path.open("rb") as file:
        try:
            return _read(file, size)
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError("it ends within its header") from error


def _read(file: BinaryIO, size: int) -> Header:
    if file.read(4) != MAGIC:
        raise ValueError("it does not begin as GGUF files do")
    version = _number(file, "I")
    if version not in VERSIONS:
        raise ValueError(
            f"it is of version {version}, and versions {VERSIONS[0]} and {VERSIONS[1]} are known"
        )
    tensors, keys = _count(file), _count(file)
    values = {_text(file): _value(file, _number(file, "I")) for _ in range(keys)}
    listed = [_tensor(file) for _ in range(tensors)]
    alignment = values.get(ALIGNMENT, _USUAL_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise ValueError(f"its {ALIGNMENT} is {alignment}, which is not a positive multiple of 8")
    start = -(-file.tell() // alignment) * alignment
    ends = [*sorted({offset for _, offset in listed}), size - start]
    after = dict(pairwise(ends))
    placed = tuple(Placed(*what, after[offset] - offset) for what, offset in listed)
    if any(each.bytes <= 0 for each in placed):
        raise ValueError("it ends before its last tensor")
    for each in placed:
        if each.elements > 8 * each.bytes:
            raise ValueError(f"its tensor {each.name} of {each.elements} numbers has only {each.bytes} bytes")
    return Header(values, placed)


def _value(file: BinaryIO, kind: int, depth: int = 0) -> Value:
    if kind == _TEXT:
        return _text(file)
    if kind == _ARRAY:
        if depth == _DEEPEST:
            raise ValueError(f"it has more than {_DEEPEST} arrays within each other")
        inner, count = _number(file, "I"), _count(file)
        if inner in _NUMBERS:
            return _numbers(file, _NUMBERS[inner], count)
        for _ in range(count):
            _value(file, inner, depth + 1)
        return count
    if kind not in _NUMBERS:
        raise ValueError(f"it has a value of the unknown kind {kind}")
    found: Value = struct.unpack(f"<{_NUMBERS[kind]}", _bytes(file, struct.calcsize(f"<{_NUMBERS[kind]}")))[0]
    return found


def _numbers(file: BinaryIO, form: str, count: int) -> Value:
    """An array of numbers, or its length where it has more than one for each layer."""
    found = _bytes(file, count * struct.calcsize(f"<{form}"))
    return count if count > _MOST_LAYERS else struct.unpack(f"<{count}{form}", found)


def _tensor(file: BinaryIO) -> tuple[tuple[str, int, tuple[int, ...]], int]:
    name, dimensions = _text(file), _number(file, "I")
    if not 1 <= dimensions <= 8:
        raise ValueError(f"it has a tensor of {dimensions} dimensions")
    shape = tuple(_number(file, "Q") for _ in range(dimensions))
    if 0 in shape:
        raise ValueError(f"its tensor {name} has the shape {list(shape)}, and so no numbers")
    kind, offset = _number(file, "I"), _number(file, "Q")
    return (name, kind, shape), offset


def _text(file: BinaryIO) -> str:
    return _bytes(file, _count(file)).decode("utf-8", errors="replace")


def _count(file: BinaryIO) -> int:
    found = _number(file, "Q")
    if found > _MOST:
        raise ValueError(f"it has a count of {found}")
    return found


def _number(file: BinaryIO, form: str) -> int:
    found: int = struct.unpack(f"<{form}", _bytes(file, struct.calcsize(f"<{form}")))[0]
    return found


def _bytes(file: BinaryIO, count: int) -> bytes:
    found = file.read(count)
    if len(found) < count:
        raise struct.error
    return found
