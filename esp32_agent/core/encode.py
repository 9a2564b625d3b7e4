"""Writes JSON straight into one bytearray.

MicroPython's dicts have no order, and its json escapes other characters than CPython's: what is digested and signed is
written here, in ASCII, without blanks, keys in the order in which they are called. Numbers are integers.
"""


class Writer:
    def __init__(self) -> None:
        self.out = bytearray()
        self._comma = False

    def begin(self, bracket: str) -> None:
        """Opens `{` or `[`."""
        self._separate()
        self.out += bracket.encode()
        self._comma = False

    def end(self, bracket: str) -> None:
        """Closes with `}` or `]`."""
        self.out += bracket.encode()
        self._comma = True

    def key(self, name: str) -> None:
        self._separate()
        self._text(name)
        self.out += b":"
        self._comma = False

    def value(self, value: int | str | None) -> None:
        self._separate()
        if value is None:
            self.out += b"null"
        elif value is True or value is False:
            self.out += b"true" if value else b"false"
        elif isinstance(value, int):
            self.out += str(value).encode()
        else:
            self._text(value)
        self._comma = True

    def field(self, name: str, value: int | str | None) -> None:
        self.key(name)
        self.value(value)

    def raw(self, data: bytes) -> None:
        """A value that is JSON already."""
        self._separate()
        self.out += data
        self._comma = True

    def _separate(self) -> None:
        if self._comma:
            self.out += b","

    def _text(self, text: str) -> None:
        out = self.out
        out += b'"'
        for letter in text:
            code = ord(letter)
            if code in (0x22, 0x5C):
                out.append(0x5C)
                out.append(code)
            elif 0x20 <= code < 0x7F:
                out.append(code)
            elif 0xD800 <= code < 0xE000:
                out.append(0x3F)  # half of a pair is no character
            elif code < 0x10000:
                out += _escaped(code)
            else:
                out += _escaped(0xD800 + ((code - 0x10000) >> 10))
                out += _escaped(0xDC00 + ((code - 0x10000) & 0x3FF))
        out += b'"'


def _escaped(code: int) -> bytes:
    return b"\\u" + f"{code:04x}".encode()
