"""The signatures of devices: HMAC-SHA256 over what a request is, the sealing of a key that a device made, and the
invitation codes that devices enrol with.

A signed request has one header::

    Authorization: OptiGPU1 key=KEY_ID,time=US,boot=BOOT,seq=N,fw=SHA256,sig=SHA256

Text is signed as it was sent, so that there is nothing to interpret before the signature is verified.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass

SCHEME = "OptiGPU1"
KEY_BYTES = 32
_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_HEADER = re.compile(
    rf"{SCHEME} key=(?P<key_id>(?P<device_id>{_UUID})\.(?P<version>[1-9][0-9]{{0,5}})),"
    r"time=(?P<time>0|[1-9][0-9]{0,15}),boot=(?P<boot>[0-9a-f]{16}),seq=(?P<seq>[1-9][0-9]{0,14}),"
    r"fw=(?P<fw>[0-9a-f]{64}),sig=(?P<sig>[0-9a-f]{64})"
)
_NO_KEY = bytes(KEY_BYTES)


@dataclass(frozen=True)
class Signature:
    """The header of a signed request, each part in the text that was sent."""

    device_id: str
    version: int
    time: str
    boot: str
    seq: str
    fw: str
    sig: str

    @property
    def key_id(self) -> str:
        return f"{self.device_id}.{self.version}"

    def is_of(self, key: bytes | None, method: str, path: str, body_sha256: str) -> bool:
        """Whether the key signed this request. It takes as long without a key as with one."""
        parts = (SCHEME, method, path, self.key_id, self.time, self.boot, self.seq, self.fw, body_sha256)
        expected = hmac_of(key or _NO_KEY, "\n".join(parts).encode()).hex()
        return hmac.compare_digest(expected, self.sig) and key is not None


def read_header(value: str) -> Signature | None:
    """The signature of a header `Authorization`; None if it is not one."""
    match = _HEADER.fullmatch(value)
    if match is None:
        return None
    return Signature(
        device_id=match["device_id"],
        version=int(match["version"]),
        time=match["time"],
        boot=match["boot"],
        seq=match["seq"],
        fw=match["fw"],
        sig=match["sig"],
    )


ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
"""Crockford's base 32, which has no I, L, O and U."""
GROUP, SECRET_GROUPS = 4, 3
CLAIM_LABEL = b"optigpu-claim:"


@dataclass(frozen=True)
class InviteCode:
    """A code such as ABCD-EFGH-JKMN-PQRS: `public` names the invitation, `secret`, of 60 bits, proves that one has it.
    The server keeps only the SHA-256 of the secret."""

    public: str
    secret: str

    @property
    def text(self) -> str:
        groups = [self.secret[at : at + GROUP] for at in range(0, len(self.secret), GROUP)]
        return "-".join([self.public, *groups])

    @property
    def verifier(self) -> bytes:
        """SHA-256 of the secret with its label: what the server keeps, and the key that a claim is proven with."""
        return hashlib.sha256(CLAIM_LABEL + self.secret.encode()).digest()


def new_code() -> InviteCode:
    drawn = "".join(secrets.choice(ALPHABET) for _ in range(GROUP * (1 + SECRET_GROUPS)))
    return InviteCode(drawn[:GROUP], drawn[GROUP:])


def claim_proof(verifier: bytes, nonce: str, sealed_key: str, board: str, firmware: str) -> str:
    """What shows that a device has the code, and what it claims with it, in hexadecimal."""
    return hmac_of(verifier, f"optigpu-proof:{nonce}:{sealed_key}:{board}:{firmware}".encode()).hex()


def open_claimed(verifier: bytes, nonce: str, sealed_key: str) -> bytes:
    """The key that a new device sealed with its code. Sealing is the same operation."""
    return _xor(bytes.fromhex(sealed_key), hmac_of(verifier, f"optigpu-seal:{nonce}".encode()))


def open_rotated(old_key: bytes, nonce: str, sealed_key: str) -> bytes:
    """The new key that a device sealed with its old one. Sealing is the same operation."""
    return _xor(bytes.fromhex(sealed_key), hmac_of(old_key, f"optigpu-rotate:{nonce}".encode()))


def hmac_of(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))
