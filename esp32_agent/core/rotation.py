"""A new key in place of the old one: made here, sealed with the old key, kept before it is sent.

The old key holds until the new one is first used, so at every moment the device has a key that the service takes.
"""

from esp32_agent.core import signing
from esp32_agent.core.encode import Writer
from esp32_agent.core.keystore import KEY_BYTES, Identity, Kept, keep, load
from esp32_agent.core.session import Answer, Session
from esp32_agent.port.base import Port

_PENDING = "rotation"


def is_pending(port: Port) -> bool:
    """Whether a rotation was sent and not answered."""
    return port.storage.size(_PENDING) > 0


def rotate(port: Port, session: Session) -> Answer:
    """Sends the new key, and takes it up if the service has it. Raises StorageFullError."""
    old = session.identity
    if old is None:
        return Answer(0, {}, b"", "not enrolled")
    pending = load(port.storage, _PENDING, 1)
    if (
        pending is not None and pending.key == old.key
    ):  # taken up, and the power was cut before the file was removed
        port.storage.remove(_PENDING)
        pending = None
    if pending is None:
        pending = Kept([port.board.random_bytes(16).hex()], port.board.random_bytes(KEY_BYTES))
        keep(port.storage, _PENDING, pending)
    answer = session.post("/key", _body(pending, old))
    key_id = answer.name("key_id")
    if answer.status == 200 and key_id is not None:
        new = Identity(old.device_id, key_id, old.invite, pending.key)
        new.save(port.storage)
        session.identity = new
        port.storage.remove(_PENDING)
    elif answer.status in (409, 422):
        port.storage.remove(_PENDING)  # this one will not be taken: the next one is made anew
    return answer


def _body(pending: Kept, old: Identity) -> bytes:
    nonce = pending.lines[0]
    writer = Writer(192)
    writer.begin("{")
    writer.field("schema", 1)
    writer.field("nonce", nonce)
    writer.field("sealed_key", signing.seal_rotation(pending.key, old.key, nonce))
    writer.end("}")
    return writer.done()
