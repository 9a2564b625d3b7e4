"""Writes JSON straight into one buffer.

MicroPython's dicts have no order, and its json escapes other characters than CPython's: what is digested and signed is
written here, in ASCII, without blanks, keys in the order in which they are called. Numbers are integers. The buffer is
made once, because one that grows by a few bytes at a time leaves a small heap in pieces.
"""

_GROWTH = 256


class Writer:
    def __init__(self, size: int) -> None:
        """`size` is about how many bytes will be written; more than that is no error."""
        self._buffer = bytearray(size)
        self._used = 0
        self._comma = False

    def done(self) -> bytes:
        """What was written."""
        return bytes(memoryview(self._buffer)[: self._used])

    def begin(self, bracket: str) -> None:
        """Opens `{` or `[`."""
        self._separate()
        self._put(bracket.encode())
        self._comma = False

    def end(self, bracket: str) -> None:
        """Closes with `}` or `]`."""
        self._put(bracket.encode())
        self._comma = True

    def key(self, name: str) -> None:
        self._separate()
        self._text(name)
        self._put(b":")
        self._comma = False

    def value(self, value: int | str | None) -> None:
        self._separate()
        if value is None:
            self._put(b"null")
        elif value is True or value is False:
            self._put(b"true" if value else b"false")
        elif isinstance(value, int):
            self._put(str(value).encode())
        else:
            self._text(value)
        self._comma = True

    def field(self, name: str, value: int | str | None) -> None:
        self.key(name)
        self.value(value)

    def raw(self, data: bytes | memoryview) -> None:
        """A value that is JSON already."""
        self._separate()
        self._put(data)
        self._comma = True

    def _separate(self) -> None:
        if self._comma:
            self._put(b",")

    def _text(self, text: str) -> None:
        self._put(b'"')
        self._put(text.encode() if _is_plain(text) else _escaped(text))
        self._put(b'"')

    def _put(self, data: bytes | memoryview) -> None:
        end = self._used + len(data)
        if end > len(self._buffer):
            self._buffer.extend(bytes(end - len(self._buffer) + _GROWTH))
        self._buffer[self._used : end] = data
        self._used = end


def _is_plain(text: str) -> bool:
    return all(0x20 <= ord(letter) < 0x7F and letter not in '"\\' for letter in text)


def _escaped(text: str) -> bytes:
    out = bytearray()
    for letter in text:
        code = ord(letter)
        if letter in '"\\':
            out.append(0x5C)
            out.append(code)
        elif 0x20 <= code < 0x7F:
            out.append(code)
        elif 0xD800 <= code < 0xE000:
            out.append(0x3F)  # half of a pair is no character
        elif code < 0x10000:
            out.extend(_unit(code))
        else:
            out.extend(_unit(0xD800 + ((code - 0x10000) >> 10)))
            out.extend(_unit(0xDC00 + ((code - 0x10000) & 0x3FF)))
    return bytes(out)


def _unit(code: int) -> bytes:
    return b"\\u" + f"{code:04x}".encode()
