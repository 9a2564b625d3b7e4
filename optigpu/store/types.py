"""Column types that behave alike on PostgreSQL and SQLite. No key counts up by itself: SQLite does that for INTEGER
alone."""

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic_core import from_json, to_json
from sqlalchemy import JSON, DateTime, Dialect, String, Text
from sqlalchemy.orm import mapped_column
from sqlalchemy.types import TypeDecorator

from optigpu.vocabulary import check_document

Identifier = Annotated[str, mapped_column(String(36))]
"""A UUID as text."""

Digest = Annotated[str, mapped_column(String(64))]
"""SHA-256 in hexadecimal."""


class UtcDateTime(TypeDecorator[datetime]):
    """An aware moment in UTC. SQLite keeps no time zone and would hand back a naive one."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Raises ValueError for a time without a time zone."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"{value} has no time zone; use an aware moment, such as utc_now().")
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Always aware, always UTC, whatever the server's time zone is."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Document(TypeDecorator[Any]):
    """JSON that comes back as it went in: JSONB sorts keys and rewrites numbers. Raises DocumentError for NaN,
    infinity, NUL and half surrogates, which only one of the two databases would take."""

    impl = JSON(none_as_null=True)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """Checks the document, then leaves it to JSON."""
        check_document(value)
        return value


class JsonText(TypeDecorator[dict[str, object]]):
    """A JSON object in a column of text, read and written by pydantic-core."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: dict[str, object] | None, dialect: Dialect) -> str | None:
        """Writes the object."""
        return None if value is None else to_json(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> dict[str, object] | None:
        """Reads the object."""
        return None if value is None else from_json(value)


class PlainText(TypeDecorator[str]):
    """Text of any length. What PostgreSQL cannot hold becomes U+FFFD: a reason is worth keeping without it."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Replaces NUL characters and half surrogates."""
        return None if value is None else clean_text(value)


def clean_text(text: str) -> str:
    """The text with each character that not every database can hold replaced by U+FFFD."""
    return text.replace("\x00", "\ufffd").encode("utf-16", "surrogatepass").decode("utf-16", "replace")
