"""One file of the queue: `OGQ1`, its generation, then records, each length (4 bytes), CRC32 (4 bytes), payload.

All numbers are big-endian. A record is whole if its payload lies within the file and has the CRC.
"""

import binascii

from esp32_agent.port.base import Storage

HEADER = 8
FRAME = 8
MOST = 8192
"""The largest payload in bytes."""
_MAGIC = b"OGQ1"
_CHUNK = 256


class Log:
    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self.name = name

    def generation(self) -> int | None:
        """The number in the header; None where the header is missing or damaged."""
        header = self._storage.read(self.name, 0, HEADER)
        if header is None or len(header) < HEADER or header[:4] != _MAGIC:
            return None
        return int.from_bytes(header[4:], "big")

    def size(self) -> int:
        return self._storage.size(self.name)

    def next(self, at: int, end: int) -> tuple[int, int] | None:
        """Where the first whole record at or after `at` starts, and its payload's length; None where there is none.

        It looks at every byte, so that a damaged length costs one record and not all after it.
        """
        while at + FRAME <= end:
            chunk = self._storage.read(self.name, at, _CHUNK) or b""
            last = len(chunk) - FRAME
            if last < 0:
                return None
            for place in range(last + 1):
                if chunk[place] or chunk[place + 1]:
                    continue  # longer than MOST
                length = int.from_bytes(chunk[place : place + 4], "big")
                start = at + place
                if not 0 < length <= MOST or start + FRAME + length > end:
                    continue
                if self._crc(start + FRAME, length) == int.from_bytes(chunk[place + 4 : place + 8], "big"):
                    return start, length
            at += last + 1
        return None

    def payload(self, start: int, length: int) -> bytes:
        return self._storage.read(self.name, start + FRAME, length) or b""

    def append(self, payload: bytes) -> int:
        """Adds a record and returns how many bytes that took. Raises StorageFullError; a part may be there then."""
        frame = len(payload).to_bytes(4, "big") + binascii.crc32(payload).to_bytes(4, "big")
        self._storage.append(self.name, frame + payload)
        return FRAME + len(payload)

    def begin(self, generation: int) -> None:
        """An empty log with a header. Raises StorageFullError."""
        self.remove()
        self._storage.append(self.name, _MAGIC + generation.to_bytes(4, "big"))

    def copy_to(self, other: "Log", at: int, end: int) -> None:
        """Adds the bytes from `at` to `end` to another log, a chunk at a time. Raises StorageFullError."""
        while at < end:
            chunk = self._storage.read(self.name, at, min(2 * _CHUNK, end - at))
            if not chunk:
                return
            self._storage.append(other.name, chunk)
            at += len(chunk)

    def truncate(self, size: int) -> None:
        self._storage.truncate(self.name, size)

    def remove(self) -> None:
        self._storage.remove(self.name)

    def _crc(self, at: int, length: int) -> int:
        crc = 0
        while length > 0:
            chunk = self._storage.read(self.name, at, min(2 * _CHUNK, length))
            if not chunk:
                return -1
            crc = binascii.crc32(chunk, crc)
            at += len(chunk)
            length -= len(chunk)
        return crc
