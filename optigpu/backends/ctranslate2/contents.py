"""What a model.bin of CTranslate2 holds: the types and bytes of its variables. Loads neither torch nor CTranslate2."""

import struct
from collections import Counter
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path

MODEL = "model.bin"
_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
"""In the order of CTranslate2's numbers for them."""
_EMBEDDING, _POSITIONS, _HEAD = (
    "decoder/embeddings/weight",
    "decoder/position_encodings/encodings",
    "decoder/projection/weight",
)


@dataclass(frozen=True)
class Variable:
    """One tensor; `rows` is its outermost dimension, 1 of a number."""

    name: str
    type: str
    rows: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """The variables of a file, what is shared once; `aliases` are second names for some."""

    variables: tuple[Variable, ...]
    aliases: tuple[tuple[str, str], ...]

    @property
    def bytes(self) -> int:
        """Of all variables."""
        return sum(variable.bytes for variable in self.variables)

    @property
    def packed(self) -> int:
        """How many numbers have 8 bits."""
        return sum(each.elements for each in self.variables if each.type == "int8" and each.elements > 1)

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each type; single numbers are settings."""
        return dict(Counter(each.type for each in self.variables if each.elements > 1))

    @property
    def row_bytes(self) -> int:
        """What one token reads of the tables that are only looked up."""
        return sum(each.bytes // each.rows for each in self.variables if self._is_looked_up(each))

    @property
    def streamed_bytes(self) -> int:
        """What every decode step reads wholly."""
        return sum(each.bytes for each in self.variables if not self._is_looked_up(each))

    def _is_looked_up(self, variable: Variable) -> bool:
        """A tied embedding is the head too, and so is read wholly; scales go with their table."""
        tied = {_EMBEDDING, _HEAD} in [set(pair) for pair in self.aliases]
        tables = (_POSITIONS,) if tied else (_POSITIONS, _EMBEDDING)
        return variable.name.removesuffix("_scale") in tables


def contents_of(folder: Path) -> Contents:
    """Reads the file's table of variables. Raises ValueError for a file that ends too early or is none."""
    with (folder / MODEL).open("rb") as file:
        try:
            _number(file, "I")
            _text(file)
            _number(file, "I")
            variables = tuple(_variable(file) for _ in range(_number(file, "I")))
            aliases = tuple((_text(file), _text(file)) for _ in range(_number(file, "I")))
        except (struct.error, IndexError) as error:
            raise ValueError(f"{MODEL} ends too early") from error
    return Contents(variables, aliases)


def _variable(file: BufferedReader) -> Variable:
    name = _text(file)
    shape = [_number(file, "I") for _ in range(_number(file, "B"))]
    kind, size = _TYPES[_number(file, "B")], _number(file, "I")
    file.seek(size, 1)
    return Variable(name, kind, shape[0] if shape else 1, prod(shape), size)


def _text(file: BufferedReader) -> str:
    """Ends with a zero."""
    return file.read(_number(file, "H"))[:-1].decode()


def _number(file: BufferedReader, form: str) -> int:
    number: int = struct.unpack(form, file.read(struct.calcsize(form)))[0]
    return number
