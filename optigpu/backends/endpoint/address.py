"""Which servers this worker may ask, and with which keys: a job comes from somebody else, and names any address."""

import os

from optigpu.documents.endpoints import Endpoint
from optigpu.vocabulary import UnsupportedError

HOSTS, KEYS = "OPTIGPU_ENDPOINT_HOSTS", "OPTIGPU_ENDPOINT_KEYS"
"""The environment variables: HOST or HOST:PORT, and HOST:PORT=KEY, separated by commas."""


def require_allowed(endpoint: Endpoint) -> None:
    """Raises UnsupportedError for a server that the worker's settings do not allow; without any, all but loopback."""
    named = os.environ.get(HOSTS)
    if named is None:
        if endpoint.is_loopback:
            return
        raise UnsupportedError(
            f"This worker connects only to servers on its own machine, not to {endpoint.place}; set {HOSTS} to "
            f"{endpoint.place} for the worker."
        )
    if not {endpoint.host, endpoint.place} & set(_items(named)):
        raise UnsupportedError(
            f"This worker may not connect to {endpoint.place}: {HOSTS} allows {named.strip() or 'no server'}; "
            "add it there."
        )


def key_of(endpoint: Endpoint) -> str | None:
    """The key that this worker has for the server. Raises UnsupportedError for one that no header can hold."""
    for item in _items(os.environ.get(KEYS, "")):
        place, _, key = item.partition("=")
        if place.strip() == endpoint.place:
            if key and key.isascii() and key.isprintable():
                return key
            raise UnsupportedError(
                f"The key of {endpoint.place} in {KEYS} must be printable ASCII; write {endpoint.place}=KEY."
            )
    return None


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
