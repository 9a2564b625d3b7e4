"""Records that wait for their acknowledgement, through power cuts and a full medium.

They are appended to a log, `queue.a` or `queue.b`. `queue.pos` is replaced as a whole and says which log holds, how far
it was acknowledged, and how many records were dropped. After a power cut a torn tail is cut off; an older position only
sends again what the service already knows. A log that is full of acknowledged records is copied into the other file,
and the new position makes that one hold: at every moment one of the two is complete.

A log is `OGQ1`, its generation, then records, each length (4 bytes), CRC32 (4 bytes), payload. All numbers are
big-endian. A record is whole if its payload lies within the file and has the CRC.
"""

import binascii

from esp32_agent.port.base import Storage, StorageFullError

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


_POSITION = "queue.pos"
_POSITION_BYTES = 20
_NAMES = ("queue.a", "queue.b")  # of even and of odd generations
_LEAST_CAP = 512


class Queue:
    """`depth` records wait; `dropped` were lost to the cap, to a full medium or to damage; `rejected` were refused."""

    def __init__(self, storage: Storage, cap: int = 65536) -> None:
        """Recovers what is there. `cap` bounds the log in bytes: above it the oldest records are dropped."""
        self._storage = storage
        self._cap = max(cap, _LEAST_CAP)
        self._most = min(MOST, self._cap // 2)
        self.depth = self.dropped = self.rejected = 0
        self._ends: list[int] = []  # where the records of the last batch end
        self._read = HEADER  # where the oldest record that waits begins
        self._generation = 0
        self._log = self._holding(self._load())
        self._end = self._recover()

    def append(self, payload: bytes) -> bool:
        """Adds a record; False if it was dropped and counted instead."""
        need = FRAME + len(payload)
        if not 0 < len(payload) <= self._most:
            return self._drop_new()
        try:
            if self._end + need > self._cap:
                self._make_room(need)
            return self._add(payload)
        except StorageFullError:
            self._cut_partial()
        if self.depth == 0:
            self._restart()  # gives back the room of what was acknowledged
            try:
                return self._add(payload)
            except StorageFullError:
                self._cut_partial()
        return self._drop_new()

    def batch(self, most: int, most_bytes: int) -> list[bytes]:
        """The oldest records, at most so many and so many bytes, but at least one where one waits."""
        self._ends = []
        records: list[bytes] = []
        at, total = self._read, 0
        while len(records) < most and at < self._end:
            found = self._log.next(at, self._end)
            if not records and (found is None or found[0] != at):
                self._skip_damage(found[0] if found else self._end)
                at = self._read
            if found is None or found[0] != at or (records and total + found[1] > most_bytes):
                break
            records.append(self._log.payload(at, found[1]))
            total += found[1]
            at += FRAME + found[1]
            self._ends.append(at)
        return records

    def acknowledge(self, count: int, rejected: int = 0) -> None:
        """The first `count` records of the last batch were answered; `rejected` of them were refused for good."""
        self.rejected += rejected
        self._advance(count)
        if self.depth == 0 and self._end > self._cap // 4:
            self._restart()
        self._save()

    def reject(self) -> None:
        """The first record of the last batch is refused for good."""
        self.rejected += 1
        self._advance(1)
        self._save()

    def _advance(self, count: int) -> None:
        self._read = self._ends[count - 1]
        self._ends = self._ends[count:]
        self.depth -= count

    def _load(self) -> int | None:
        """Reads the position; the generation that holds, or None where the file is missing or damaged."""
        data = self._storage.read(_POSITION) or b""
        if len(data) != _POSITION_BYTES or binascii.crc32(data[:16]) != _u32(data, 16):
            return None
        self._read = max(HEADER, _u32(data, 4))
        self.dropped, self.rejected = _u32(data, 8), _u32(data, 12)
        return _u32(data, 0)

    def _holding(self, known: int | None) -> Log:
        """The log that holds; the other one is removed. A position of another generation means nothing for it."""
        logs = [Log(self._storage, name) for name in _NAMES]
        place = (known or 0) & 1
        if known is None and logs[0].size() and logs[1].size():
            # A copy was cut short, or its source not yet removed: the source has all records.
            place = 0 if (logs[0].generation() or 0) < (logs[1].generation() or 0) else 1
        elif logs[place].size() == 0 and logs[1 - place].size():
            place, known = 1 - place, None
        actual = logs[place].generation()
        if known is None or (actual is not None and actual != known):
            known, self._read = actual if actual is not None else place, HEADER
        self._generation = known
        logs[1 - place].remove()
        return logs[place]

    def _recover(self) -> int:
        """Counts the records and cuts a torn tail off; where the log ends."""
        size = self._log.size()
        if size < HEADER:
            self.dropped += 1 if size else 0
            self._restart()
            return 0
        is_beyond = self._read > size
        self._read = min(self._read, size)
        end = self._count(size)
        if end < size:
            self._log.truncate(end)
            self.dropped += 1
        if end < size or is_beyond:
            self._save()
        return end

    def _count(self, size: int) -> int:
        """Sets `depth`; where the last whole record ends."""
        self.depth, at = 0, self._read
        found = self._log.next(at, size)
        while found:
            self.depth += 1
            at = found[0] + FRAME + found[1]
            found = self._log.next(at, size)
        return at

    def _add(self, payload: bytes) -> bool:
        if self._end == 0:
            self._log.begin(self._generation)
            self._end = self._read = HEADER
        self._end += self._log.append(payload)
        self.depth += 1
        return True

    def _cut_partial(self) -> None:
        """Cuts off what a full medium let through."""
        size = self._log.size()
        if size < HEADER:
            self._log.remove()
            self._end = 0
        elif size > self._end:
            self._log.truncate(self._end)

    def _drop_new(self) -> bool:
        self.dropped += 1
        self._save()
        return False

    def _skip_damage(self, at: int) -> None:
        """Goes on behind a damaged record."""
        self.dropped += 1
        self._read = at
        self._count(self._end)
        self._save()

    def _make_room(self, need: int) -> None:
        """Drops the oldest records down to three quarters of the cap, and copies the others into the other file."""
        at, dropped = self._read, 0
        while self._end - at + need > 3 * self._cap // 4:
            found = self._log.next(at, self._end)
            if found is None:
                at = self._end
                break
            at = found[0] + FRAME + found[1]
            dropped += 1
        generation = self._generation + 1
        other = Log(self._storage, _NAMES[generation & 1])
        try:
            other.begin(generation)
            self._log.copy_to(other, at, self._end)
            self._store(generation, HEADER, self.dropped + dropped)
        except StorageFullError:
            other.remove()
            raise
        self._log.remove()
        self._log, self._generation = other, generation
        self._read, self._end = HEADER, HEADER + self._end - at
        self.depth -= dropped
        self.dropped += dropped
        self._ends = []

    def _restart(self) -> None:
        """Begins an empty log under the next generation; in the last one nothing waits."""
        self._log.remove()
        self._generation += 1
        self._log = Log(self._storage, _NAMES[self._generation & 1])
        self._read, self._end = HEADER, 0

    def _save(self) -> None:
        """Writes the position. Where that fails, a reboot sends again what was acknowledged, which does no harm."""
        try:
            self._store(self._generation, self._read, self.dropped)
        except StorageFullError:
            pass

    def _store(self, generation: int, offset: int, dropped: int) -> None:
        data = bytearray()
        for number in (generation, offset, dropped, self.rejected):
            data += number.to_bytes(4, "big")
        data += binascii.crc32(bytes(data)).to_bytes(4, "big")
        self._storage.replace(_POSITION, bytes(data))


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")
