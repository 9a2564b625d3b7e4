"""How a device gets its identity, changes its key, and signs: HMAC-SHA256 over what a request is.

A signed request has one header::

    Authorization: OptiGPU1 key=KEY_ID,time=US,boot=BOOT,seq=N,fw=SHA256,sig=SHA256

Text is signed as it was sent, so that there is nothing to interpret before the signature is verified: it is verified
over the raw bytes before anything is parsed. Whatever is wrong with a signature has one answer, and takes the same
time: who guesses learns nothing.
"""

import hashlib
import hmac
import re
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

from anyio import from_thread
from fastapi import Depends, Request, Security
from fastapi.security import APIKeyHeader

from api.auth import address_of
from api.device_messages import (
    CLOCK_WINDOW_US,
    ClaimAnswer,
    ClaimRequest,
    KeyAnswer,
    KeyRequest,
    clock_is_set,
)
from api.inputs import Id, json_body
from api.problems import ProblemError
from api.service import Service, ServiceDep
from optigpu.job.spec import digest
from optigpu.store import devices
from optigpu.store.database import KeyRefusedError, Session, moment
from optigpu.store.devices import FIRST_VERSION, DeviceRequest, Entered, Invite, NewDevice
from optigpu.vocabulary import Frozen

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


_NO_VERIFIER = bytes(KEY_BYTES)


class Claimed(Frozen):
    """A device that is enrolled. `created` is False when the same claim had been answered before."""

    answer: ClaimAnswer
    created: bool


def claim(session: Session, asked: ClaimRequest) -> Claimed:
    """Enrols a device that proves to have the code of an invitation which is open.

    The same claim again gets the same answer until the invitation expires: the first answer may have been lost. Raises
    ProblemError 403 for every other one, whatever is wrong with it.
    """
    now = moment(session)
    now_us = int(now.timestamp() * 1e6)
    invite = devices.open_at(session, asked.invite, now)
    claim_digest = digest(asked.model_dump(mode="json", exclude={"name"}))
    if invite is not None and invite.device_id is not None and invite.claim_digest == claim_digest:
        return Claimed(answer=_answer(invite.device_id, now_us), created=False)
    verifier = _verifier(invite, asked)
    if invite is None or verifier is None:
        raise ProblemError(
            403,
            "No open invitation fits this claim: it may be unknown, expired or used, or the proof is wrong. Ask the "
            "operator for a new code.",
        )
    device = NewDevice(
        name=invite.name or asked.name,
        board=asked.board,
        source=invite.source,
        firmware_sha256=asked.firmware,
        secret=open_claimed(verifier, asked.nonce, asked.sealed_key),
    )
    device_id = devices.enrol(session, device, now)
    devices.close(session, invite.code, device_id=device_id, claim_digest=claim_digest, now=now)
    return Claimed(answer=_answer(device_id, now_us), created=True)


def rotate(session: Session, request: DeviceRequest, asked: KeyRequest, *, newest: bool) -> KeyAnswer:
    """Enters the key that follows the one that signed the request. Raises ConflictError as `devices.put_key`."""
    old = devices.secret_of(session, request.device_id, request.key_version)
    assert old is not None, "the device is locked, and its key was valid when it was"
    new = open_rotated(old, asked.nonce, asked.sealed_key)
    version = devices.put_key(session, request, new, newest=newest)
    return KeyAnswer(key_id=f"{request.device_id}.{version}")


def _verifier(invite: Invite | None, asked: ClaimRequest) -> bytes | None:
    """That of the invitation if the claim proves to have it. It takes as long for one that is not there."""
    kept = bytes.fromhex(invite.verifier) if invite and invite.verifier else None
    expected = claim_proof(kept or _NO_VERIFIER, asked.nonce, asked.sealed_key, asked.board, asked.firmware)
    return kept if hmac.compare_digest(expected, asked.proof) else None


def _answer(device_id: str, now_us: int) -> ClaimAnswer:
    return ClaimAnswer(device_id=device_id, key_id=f"{device_id}.{FIRST_VERSION}", server_time_us=now_us)


MOST_BODY_BYTES = 65_536

_SCHEME = APIKeyHeader(
    name="Authorization",
    scheme_name="DeviceSignature",
    auto_error=False,
    description=(
        f"`{SCHEME} key=KEY_ID,time=US,boot=BOOT,seq=N,fw=SHA256,sig=SHA256`, where sig is the HMAC-SHA256 with the "
        f"device's key over the lines {SCHEME}, method, path, KEY_ID, time, boot, seq, fw and the SHA-256 of the body."
    ),
)


@dataclass(frozen=True)
class Arrived:
    """A body, and when the last of it came (monotonic seconds)."""

    body: bytes
    at_s: float


@dataclass(frozen=True)
class SignedRequest:
    """A request whose signature is right, with its body, which nobody has parsed yet."""

    request: DeviceRequest
    body: bytes


async def arrived_body(request: Request) -> Arrived:
    """The body of a device's request."""
    body = await json_body(request, MOST_BODY_BYTES)
    return Arrived(body, time.monotonic())


def signed_request(
    device_id: Id,
    request: Request,
    service: ServiceDep,
    arrived: Annotated[Arrived, Depends(arrived_body)],
    _: Annotated[str | None, Security(_SCHEME)],
) -> SignedRequest:
    """Verifies the signature, then counts the call against the device's limit, then looks at its clock.

    Raises ProblemError 401 or 429. What is not signed counts for its address, so that nobody can use up the calls of a
    device.
    """
    signature = _signature(request)
    with service.database.read() as session:
        secret = devices.secret_of(session, signature.device_id, signature.version) if signature else None
        now = moment(session)
    if signature is None or not _is_right(signature, secret, device_id, request, service, arrived.body):
        raise _refused(service, request)
    from_thread.run(service.device_limiter.count, f"device:{device_id}")
    sent_us, now_us = int(signature.time), int(now.timestamp() * 1e6)
    if clock_is_set(sent_us) and abs(sent_us - now_us) > CLOCK_WINDOW_US:
        raise _stale(sent_us, now_us)
    return SignedRequest(
        DeviceRequest(
            device_id=device_id,
            key_version=signature.version,
            boot_id=signature.boot,
            sequence=int(signature.seq),
            firmware_sha256=signature.fw,
            clock_synchronised=clock_is_set(sent_us),
            received_at=now - timedelta(seconds=time.monotonic() - arrived.at_s),
        ),
        arrived.body,
    )


Signed = Annotated[SignedRequest, Depends(signed_request)]


def entered(session: Session, request: DeviceRequest) -> Entered:
    """Locks the device and notes its request. Raises ProblemError 401 if the key is no longer valid."""
    try:
        return devices.enter(session, request)
    except KeyRefusedError:
        raise unauthorized() from None


def unauthorized() -> ProblemError:
    """The one answer to a signature that is missing, wrong, or by an unknown or revoked key."""
    return ProblemError(
        401,
        "The signature does not match this request, or its key is unknown or revoked.",
        headers={"WWW-Authenticate": SCHEME},
    )


def _signature(request: Request) -> Signature | None:
    """That of the header; None for several headers, or one that is not a signature."""
    headers = request.headers.getlist("authorization")
    return read_header(headers[0]) if len(headers) == 1 else None


def _is_right(
    signature: Signature,
    secret: bytes | None,
    device_id: str,
    request: Request,
    service: Service,
    body: bytes,
) -> bool:
    """Behind a proxy that serves the API under a prefix the device may have signed the path with it or without."""
    prefix = service.settings.prefix
    path = request.scope["path"].removeprefix(prefix)
    digest = hashlib.sha256(body).hexdigest()
    matches = [
        signature.is_of(secret, request.method, each, digest) for each in dict.fromkeys((path, prefix + path))
    ]
    return any(matches) and signature.device_id == device_id


def _refused(service: Service, request: Request) -> ProblemError:
    from_thread.run(service.limiter.count, f"address:{address_of(request)}")
    return unauthorized()


def _stale(sent_us: int, now_us: int) -> ProblemError:
    return ProblemError(
        401,
        f"The request's time differs by {abs(sent_us - now_us) // 1_000_000} s from the server's; set the clock by "
        "`server_time_us` and sign again.",
        headers={"WWW-Authenticate": SCHEME},
        server_time_us=now_us,
    )
