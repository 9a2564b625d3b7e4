"""What the agent makes with its key, by HMAC-SHA256 (RFC 2104) from hashlib alone, and the small files that hold a key:
lines of text, the key in hex as the last one. Each file is replaced as a whole. All hex is lower case."""

import hashlib

from esp32_agent.port.base import Storage

_BLOCK = 64
SCHEME = "OptiGPU1"


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).digest().hex()


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    if len(key) > _BLOCK:
        key = hashlib.sha256(key).digest()
    inner = hashlib.sha256(_padded(key, 0x36))
    inner.update(message)
    outer = hashlib.sha256(_padded(key, 0x5C))
    outer.update(inner.digest())
    return outer.digest()


def _padded(key: bytes, pad: int) -> bytes:
    block = bytearray(_BLOCK)
    for place in range(_BLOCK):
        block[place] = pad ^ (key[place] if place < len(key) else 0)
    return bytes(block)


class Stamp:
    """What a signature binds a request to, besides its method, path and body."""

    def __init__(self, key_id: str, time_us: int, boot_id: str, sequence: int, firmware: str) -> None:
        self.key_id = key_id
        self.time_us = time_us  # 0 while the clock is not set
        self.boot_id = boot_id
        self.sequence = sequence  # of the requests of this boot, from 1
        self.firmware = firmware


def string_to_sign(method: str, path: str, stamp: Stamp, body: bytes) -> bytes:
    """The lines that are signed; `path` has no query."""
    lines = (
        SCHEME,
        method,
        path,
        stamp.key_id,
        str(stamp.time_us),
        stamp.boot_id,
        str(stamp.sequence),
        stamp.firmware,
        sha256_hex(body),
    )
    return "\n".join(lines).encode()


def authorization(key: bytes, method: str, path: str, stamp: Stamp, body: bytes) -> str:
    """The value of the header Authorization."""
    signature = hmac_sha256(key, string_to_sign(method, path, stamp, body)).hex()
    return (
        f"{SCHEME} key={stamp.key_id},time={stamp.time_us},boot={stamp.boot_id},seq={stamp.sequence},"
        + f"fw={stamp.firmware},sig={signature}"
    )


def claim_code(secret: str) -> bytes:
    """What the service keeps of an invite's secret, its last three groups."""
    return hashlib.sha256(("optigpu-claim:" + secret.replace("-", "").upper()).encode()).digest()


def seal(key: bytes, code: bytes, nonce: str) -> str:
    """A new device's key, readable with the claim code alone."""
    return _sealed(key, code, "optigpu-seal:" + nonce)


def proof(code: bytes, nonce: str, sealed_key: str, board: str, firmware: str) -> str:
    """Shows that the sender of a claim has the code, and that nobody changed the claim."""
    return hmac_sha256(code, f"optigpu-proof:{nonce}:{sealed_key}:{board}:{firmware}".encode()).hex()


def seal_rotation(key: bytes, old_key: bytes, nonce: str) -> str:
    """The next key, readable with the key that it follows."""
    return _sealed(key, old_key, "optigpu-rotate:" + nonce)


def _sealed(key: bytes, secret: bytes, label: str) -> str:
    mask = hmac_sha256(secret, label.encode())
    return bytes([key[place] ^ mask[place] for place in range(len(mask))]).hex()


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
