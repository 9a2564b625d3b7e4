"""Cuts what comes over a serial line into commands: text of at most 80 characters that a `%` ends.

Runs on MicroPython and on CPython.
"""

LONGEST = 80
END = 0x25  # "%"


class Commands:
    """Takes bytes as they come. A line full of noise becomes one error and never more than 80 bytes of memory."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._too_long = False

    def take(self, data: bytes) -> "list[tuple[str | None, str | None]]":
        """What these bytes complete, in their order: (text, None), or (None, what is wrong with the command)."""
        found: list[tuple[str | None, str | None]] = []
        for byte in data:
            if byte == END:
                found.append(self._ended())
            elif len(self._held) < LONGEST:
                self._held.append(byte)
            else:
                self._too_long = True
        return found

    def _ended(self) -> "tuple[str | None, str | None]":
        held, too_long = bytes(self._held), self._too_long
        self._held = bytearray()
        self._too_long = False
        if too_long:
            return None, f"Command longer than {LONGEST} characters"
        for byte in held:
            if not (32 <= byte < 127 or byte in b"\r\n\t"):
                return None, f"Command with a byte 0x{byte:02x} that is no text"
        return held.decode(), None


def whole(text: str) -> "int | None":
    """The number that decimal digits spell, or None. int() would also take signs, blanks and underscores."""
    if not text or len(text) > 9:
        return None
    for letter in text:
        if letter not in "0123456789":
            return None
    return int(text)


def digits(text: str) -> bytes:
    """The bytes that pairs of hexadecimal digits spell. Raises ValueError that says what is wrong."""
    if len(text) % 2:
        raise ValueError("Insufficient number of hex digits")
    found = bytearray(len(text) // 2)
    for place in range(len(found)):
        pair = text[2 * place : 2 * place + 2]
        for letter in pair:
            if letter not in "0123456789abcdefABCDEF":
                raise ValueError(f"Invalid hex digit '{pair}'")
        found[place] = int(pair, 16)
    return bytes(found)
