"""Enrolment: the device makes a key, seals it with an invite's code, and shows that it has the code.

The claim is kept before it is sent. After a lost answer or a power cut the very same claim goes out again, to which the
service gives the same answer.
"""

from esp32_agent.core import signing
from esp32_agent.core.encode import Writer
from esp32_agent.core.keystore import KEY_BYTES, Identity, Kept, keep, load
from esp32_agent.core.session import Session
from esp32_agent.port.base import Port

DONE = "done"
REFUSED = "refused"  # this invite will not do: wrong, used, expired or revoked
LATER = "later"

_PENDING = "claim"
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
    pending = _pending(port, public)
    answer = session.send(_PATH, _body(port, pending, invite, name))
    if answer.status in (200, 201):
        device_id, key_id = answer.name("device_id"), answer.name("key_id")
        if device_id is None or key_id is None:
            return Outcome(LATER, "The answer to the claim is not the service's.")
        session.identity = Identity(device_id, key_id, public, pending.key)
        session.identity.save(port.storage)
        port.storage.remove(_PENDING)
        session.clock.refresh(answer.document.get("server_time_us"))
        return Outcome(DONE, device_id)
    state = REFUSED if answer.status in (403, 404, 422) and answer.document else LATER
    return Outcome(state, answer.reason, answer.retry_after_s)


def _pending(port: Port, public: str) -> Kept:
    """The claim that is under way with this invite, or a new one."""
    pending = load(port.storage, _PENDING, 2)
    if pending is None or pending.lines[1] != public:
        pending = Kept([port.board.random_bytes(16).hex(), public], port.board.random_bytes(KEY_BYTES))
        keep(port.storage, _PENDING, pending)
    return pending


def _body(port: Port, pending: Kept, invite: str, name: str | None) -> bytes:
    nonce, public = pending.lines
    board, firmware = port.board.name, port.board.firmware_sha256
    code = signing.claim_code(invite.strip()[len(public) + 1 :])
    sealed_key = signing.seal(pending.key, code, nonce)
    writer = Writer(512)
    writer.begin("{")
    writer.field("schema", 1)
    writer.field("invite", public)
    writer.field("nonce", nonce)
    writer.field("sealed_key", sealed_key)
    writer.field("proof", signing.proof(code, nonce, sealed_key, board, firmware))
    writer.field("board", board)
    writer.field("firmware", firmware)
    writer.field("name", name)
    writer.end("}")
    return writer.done()
