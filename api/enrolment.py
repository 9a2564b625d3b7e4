"""How a device gets its identity, and how it changes its key."""

import hmac

from api.problems import ProblemError
from optigpu.documents.devices import ClaimAnswer, ClaimRequest, KeyAnswer, KeyRequest
from optigpu.edge import signatures
from optigpu.job.spec import digest
from optigpu.store import device_invites, devices
from optigpu.store.database import Session, moment
from optigpu.store.device_invites import Invite
from optigpu.store.devices import FIRST_VERSION, DeviceRequest, NewDevice
from optigpu.vocabulary import Frozen

_NO_VERIFIER = bytes(signatures.KEY_BYTES)


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
    invite = device_invites.open_at(session, asked.invite, now)
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
        secret=signatures.open_claimed(verifier, asked.nonce, asked.sealed_key),
    )
    device_id = devices.enrol(session, device, now)
    device_invites.close(session, invite.code, device_id=device_id, claim_digest=claim_digest, now=now)
    return Claimed(answer=_answer(device_id, now_us), created=True)


def rotate(session: Session, request: DeviceRequest, asked: KeyRequest, *, newest: bool) -> KeyAnswer:
    """Enters the key that follows the one that signed the request. Raises ConflictError as `devices.put_key`."""
    old = devices.secret_of(session, request.device_id, request.key_version)
    assert old is not None, "the device is locked, and its key was valid when it was"
    new = signatures.open_rotated(old, asked.nonce, asked.sealed_key)
    version = devices.put_key(session, request, new, newest=newest)
    return KeyAnswer(key_id=f"{request.device_id}.{version}")


def _verifier(invite: Invite | None, asked: ClaimRequest) -> bytes | None:
    """That of the invitation if the claim proves to have it. It takes as long for one that is not there."""
    kept = bytes.fromhex(invite.verifier) if invite and invite.verifier else None
    expected = signatures.claim_proof(
        kept or _NO_VERIFIER, asked.nonce, asked.sealed_key, asked.board, asked.firmware
    )
    return kept if hmac.compare_digest(expected, asked.proof) else None


def _answer(device_id: str, now_us: int) -> ClaimAnswer:
    return ClaimAnswer(device_id=device_id, key_id=f"{device_id}.{FIRST_VERSION}", server_time_us=now_us)
