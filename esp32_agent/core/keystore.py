"""Small files that hold a key: lines of text, the key in hex as the last one. Each is replaced as a whole."""

from esp32_agent.port.base import Storage

KEY_BYTES = 32


class Kept:
    """The lines of a file, and its key."""

    def __init__(self, lines: list[str], key: bytes) -> None:
        self.lines = lines
        self.key = key


def keep(storage: Storage, name: str, what: Kept) -> None:
    """Raises StorageFullError."""
    lines = list(what.lines)
    lines.append(what.key.hex())
    storage.replace(name, "\n".join(lines).encode())


def load(storage: Storage, name: str, count: int) -> Kept | None:
    """What lies in the file, if that is `count` lines and a key."""
    data = storage.read(name)
    if not data:
        return None
    try:
        lines = data.decode().split("\n")
        key = bytes.fromhex(lines[-1])
    except ValueError:
        return None
    return Kept(lines[:-1], key) if len(lines) == count + 1 and len(key) == KEY_BYTES else None


class Identity:
    """A device that is enrolled; `invite` is the public id of the invite that it came with."""

    def __init__(self, device_id: str, key_id: str, invite: str, key: bytes) -> None:
        self.device_id = device_id
        self.key_id = key_id
        self.invite = invite
        self.key = key

    def save(self, storage: Storage) -> None:
        """Raises StorageFullError."""
        keep(storage, "identity", Kept([self.device_id, self.key_id, self.invite], self.key))


def load_identity(storage: Storage) -> Identity | None:
    """None before the first claim, or where the file is damaged."""
    found = load(storage, "identity", 3)
    return Identity(found.lines[0], found.lines[1], found.lines[2], found.key) if found else None
