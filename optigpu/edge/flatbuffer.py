"""Reads a FlatBuffer that may be damaged or hostile: every offset is checked before it is followed."""

import struct
from collections.abc import Iterator

from optigpu.vocabulary import SpecError

MOST_ITEMS = 2**16
"""The most items of a vector of tables or numbers. The bytes of a buffer are not copied item by item."""


class DamagedError(SpecError):
    """An offset or a length leads out of the file."""


class Table:
    """A table at a position of the data. Fields are asked for by their number in the schema."""

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - _number(data, "<i", position)
        self._fields_size = _number(data, "<H", self._fields)

    def number(self, field: int, form: str, default: int) -> int:
        """A field that is a number, by its form in `struct`."""
        place = self._place(field)
        return default if place is None else _number(self._data, form, place)

    def table(self, field: int) -> "Table | None":
        """A field that is a table; None if it is absent."""
        place = self._place(field)
        return None if place is None else Table(self._data, self._follow(place))

    def tables(self, field: int) -> "Iterator[Table]":
        """The tables of a field that is a vector of them."""
        start, length = self._vector(field, 4)
        for place in range(start, start + 4 * length, 4):
            yield Table(self._data, self._follow(place))

    def numbers(self, field: int, form: str) -> tuple[float, ...]:
        """The numbers of a field that is a vector of them."""
        size = struct.calcsize(form)
        start, length = self._vector(field, size)
        return tuple(each for (each,) in struct.iter_unpack(form, self._data[start : start + size * length]))

    def bytes(self, field: int) -> bytes:
        """A field that is a vector of bytes, or text as its bytes."""
        start, length = self._vector(field, 1)
        return self._data[start : start + length]

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._fields_size:
            return None
        offset = _number(self._data, "<H", self._fields + entry)
        return self._position + offset if offset else None

    def _follow(self, place: int) -> int:
        return place + _number(self._data, "<I", place)

    def _vector(self, field: int, size: int) -> tuple[int, int]:
        """Where its items begin, and how many there are."""
        place = self._place(field)
        if place is None:
            return 0, 0
        vector = self._follow(place)
        length = _number(self._data, "<I", vector)
        if vector + 4 + size * length > len(self._data) or (size > 1 and length > MOST_ITEMS):
            raise DamagedError("A list of it is longer than the file.")
        return vector + 4, length


def root(data: bytes) -> Table:
    """The outermost table."""
    return Table(data, _number(data, "<I", 0))


def _number(data: bytes, form: str, place: int) -> int:
    if place < 0 or place + struct.calcsize(form) > len(data):
        raise DamagedError(f"It ends at byte {len(data)}, before what it refers to.")
    number: int = struct.unpack_from(form, data, place)[0]
    return number
