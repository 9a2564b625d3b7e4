"""Tags of answers (ETag), by which a client asks whether what it has still holds."""

import hashlib


def tag_of(body: bytes) -> str:
    """The strong tag of this body."""
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def is_known(tag: str | None, if_none_match: str | None) -> bool:
    """Whether the client has the answer with this tag, weak or strong."""
    if tag is None or if_none_match is None:
        return False
    known = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
    return tag.removeprefix("W/") in known or "*" in known
