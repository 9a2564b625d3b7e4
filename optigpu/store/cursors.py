"""Cursors of pages: opaque to clients, a small JSON list in the service."""

import base64
import json
from typing import Any

from optigpu.store.errors import CursorError
from optigpu.vocabulary import DocumentError, check_document

LARGEST_INTEGER = 2**63


def encode_cursor(*position: object) -> str:
    """The position as URL-safe text."""
    return base64.urlsafe_b64encode(json.dumps(position).encode()).decode().rstrip("=")


def decode_cursor(cursor: str, *kinds: type | tuple[type, ...]) -> list[Any]:
    """The position of a cursor whose parts are of these kinds.

    Raises CursorError when it is not one that `encode_cursor` made of values that a database can hold.
    """
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        position = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        check_document(position)
    except (ValueError, RecursionError, DocumentError):
        raise bad_cursor() from None
    if not isinstance(position, list) or len(position) != len(kinds):
        raise bad_cursor()
    if not all(_is_a(part, kind) for part, kind in zip(position, kinds, strict=True)):
        raise bad_cursor()
    return position


def _is_a(part: object, kind: type | tuple[type, ...]) -> bool:
    fits = not isinstance(part, int) or abs(part) < LARGEST_INTEGER
    return fits and isinstance(part, kind) and not isinstance(part, bool)


def bad_cursor() -> CursorError:
    """Returns the error for a cursor that cannot be read."""
    return CursorError("The cursor does not belong to this list; leave it out to start at the first page.")
