"""The forms in which a table is sent: JSON, CSV or Markdown, as the query or the header Accept asks for."""

from enum import StrEnum


class Form(StrEnum):
    """How the rows are written."""

    JSON = "json"
    CSV = "csv"
    MARKDOWN = "md"


MEDIA_TYPES = {
    "application/json": Form.JSON,
    "text/csv": Form.CSV,
    "text/markdown": Form.MARKDOWN,
}

PAGE: dict[str, object] = {
    "description": "Boards with their rows, best first. The header Link leads to the next page.",
    "content": {media_type: {"schema": {"type": "string"}} for media_type in ("text/csv", "text/markdown")},
    "headers": {"Link": {"description": "The next page.", "schema": {"type": "string"}}},
}
"""The documentation of a page of boards."""


def query_word(value: object) -> object:
    """A parameter of an address as it is written there."""
    return str(value).lower() if isinstance(value, bool) else value


def accepted(accept: str) -> Form:
    """The form that a header Accept likes best; JSON when it names none of ours."""
    best, chosen = 0.0, Form.JSON
    for part in accept.split(","):
        media_type, *options = (piece.strip() for piece in part.split(";"))
        weight = _weight(options)
        if media_type.lower() in MEDIA_TYPES and weight > best:
            best, chosen = weight, MEDIA_TYPES[media_type.lower()]
    return chosen


def _weight(options: list[str]) -> float:
    for option in options:
        if option.startswith("q="):
            try:
                return float(option[2:])
            except ValueError:
                return 0.0
    return 1.0
