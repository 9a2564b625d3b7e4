"""Enrolment, and a new key in place of the old one. The device makes each key; it is sealed and kept before it is sent.

A claim is sealed with an invite's code, and shows that the device has the code. After a lost answer or a power cut the
very same claim goes out again, to which the service gives the same answer. A new key is sealed with the old one, which
holds until the new one is first used, so at every moment the device has a key that the service takes.
"""

from esp32_agent.core import keys
from esp32_agent.core.keys import KEY_BYTES, Identity, Kept, keep, load
from esp32_agent.core.message import Writer
from esp32_agent.core.session import Answer, Session
from esp32_agent.port.base import Port

DONE = "done"
REFUSED = "refused"  # this invite will not do: wrong, used, expired or revoked
LATER = "later"

_CLAIM = "claim"
_PATH = "/v1/devices/claim"


class Outcome:
    def __init__(self, state: str, reason: str, retry_after_s: int | None = None) -> None:
        self.state = state
        self.reason = reason
        self.retry_after_s = retry_after_s


def public_id(invite: str) -> str:
    """The first group of an invite such as ABCD-EFGH-JKMN-PQRS; empty where that is none."""
    groups = invite.strip().upper().split("-")
    return groups[0] if len(groups) == 4 and all(len(group) == 4 for group in groups) else ""


def claim(port: Port, session: Session, invite: str, name: str | None) -> Outcome:
    """Sends the claim, and on success keeps the identity. Raises StorageFullError."""
    public = public_id(invite)
    if not public:
        return Outcome(REFUSED, "The invite is not four groups of four characters.")
    pending = _pending_claim(port, public)
    answer = session.send(_PATH, _claim_body(port, pending, invite, name))
    if answer.status in (200, 201):
        device_id, key_id = answer.name("device_id"), answer.name("key_id")
        if device_id is None or key_id is None:
            return Outcome(LATER, "The answer to the claim is not the service's.")
        session.identity = Identity(device_id, key_id, public, pending.key)
        session.identity.save(port.storage)
        port.storage.remove(_CLAIM)
        session.clock.refresh(answer.document.get("server_time_us"))
        return Outcome(DONE, device_id)
    state = REFUSED if answer.status in (403, 404, 422) and answer.document else LATER
    return Outcome(state, answer.reason, answer.retry_after_s)


def _pending_claim(port: Port, public: str) -> Kept:
    """The claim that is under way with this invite, or a new one."""
    pending = load(port.storage, _CLAIM, 2)
    if pending is None or pending.lines[1] != public:
        pending = Kept([port.board.random_bytes(16).hex(), public], port.board.random_bytes(KEY_BYTES))
        keep(port.storage, _CLAIM, pending)
    return pending


def _claim_body(port: Port, pending: Kept, invite: str, name: str | None) -> bytes:
    nonce, public = pending.lines
    board, firmware = port.board.name, port.board.firmware_sha256
    code = keys.claim_code(invite.strip()[len(public) + 1 :])
    sealed_key = keys.seal(pending.key, code, nonce)
    writer = Writer(512)
    writer.begin("{")
    writer.field("schema", 1)
    writer.field("invite", public)
    writer.field("nonce", nonce)
    writer.field("sealed_key", sealed_key)
    writer.field("proof", keys.proof(code, nonce, sealed_key, board, firmware))
    writer.field("board", board)
    writer.field("firmware", firmware)
    writer.field("name", name)
    writer.end("}")
    return writer.done()


_ROTATION = "rotation"


def is_pending(port: Port) -> bool:
    """Whether a rotation was sent and not answered."""
    return port.storage.size(_ROTATION) > 0


def rotate(port: Port, session: Session) -> Answer:
    """Sends the new key, and takes it up if the service has it. Raises StorageFullError."""
    old = session.identity
    if old is None:
        return Answer(0, {}, b"", "not enrolled")
    pending = load(port.storage, _ROTATION, 1)
    if (
        pending is not None and pending.key == old.key
    ):  # taken up, and the power was cut before the file was removed
        port.storage.remove(_ROTATION)
        pending = None
    if pending is None:
        pending = Kept([port.board.random_bytes(16).hex()], port.board.random_bytes(KEY_BYTES))
        keep(port.storage, _ROTATION, pending)
    answer = session.post("/key", _rotation_body(pending, old))
    key_id = answer.name("key_id")
    if answer.status == 200 and key_id is not None:
        new = Identity(old.device_id, key_id, old.invite, pending.key)
        new.save(port.storage)
        session.identity = new
        port.storage.remove(_ROTATION)
    elif answer.status in (409, 422):
        port.storage.remove(_ROTATION)  # this one will not be taken: the next one is made anew
    return answer


def _rotation_body(pending: Kept, old: Identity) -> bytes:
    nonce = pending.lines[0]
    writer = Writer(192)
    writer.begin("{")
    writer.field("schema", 1)
    writer.field("nonce", nonce)
    writer.field("sealed_key", keys.seal_rotation(pending.key, old.key, nonce))
    writer.end("}")
    return writer.done()
