"""Column types that behave alike on PostgreSQL and SQLite, and statements that differ between them.

These are INSERT with a conflict clause, the clock, spans and locks by name. No key counts up by itself: SQLite does
that for INTEGER alone. The cursors of pages stand here too: opaque to clients, a small JSON list in the service.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

from pydantic_core import from_json, to_json
from sqlalchemy import (
    JSON,
    ColumnElement,
    DateTime,
    Dialect,
    Double,
    Select,
    String,
    TableClause,
    Text,
    cast,
    extract,
    func,
    literal,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import QueryableAttribute, Session, mapped_column
from sqlalchemy.types import TypeDecorator

from optigpu.vocabulary import DocumentError, StoreError, check_document, utc_now

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


LARGEST_INTEGER = 2**63


class CursorError(StoreError):
    """The cursor of a page was not issued by this service."""


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
    for part, kind in zip(position, kinds, strict=True):
        too_large = isinstance(part, int) and abs(part) >= LARGEST_INTEGER
        if too_large or isinstance(part, bool) or not isinstance(part, kind):
            raise bad_cursor()
    return position


def newest_of(cursor: str | None) -> str | None:
    """The newest id of the board behind which a cursor continues a list of boards; None where it continues the rows of
    one board, or nothing."""
    try:
        return None if cursor is None else str(decode_cursor(cursor, str)[0])
    except CursorError:
        return None


def bad_cursor() -> CursorError:
    """Returns the error for a cursor that cannot be read."""
    return CursorError("The cursor does not belong to this list; leave it out to start at the first page.")


Row = TypeVar("Row")
Insert = postgresql.Insert | sqlite.Insert
Moment = QueryableAttribute[datetime] | QueryableAttribute[datetime | None]


def insert_into(session: Session, table: type[Any] | TableClause) -> Insert:
    """An INSERT that offers `on_conflict_do_nothing` and `on_conflict_do_update`, for the session's database."""
    return postgresql.insert(table) if is_postgresql(session) else sqlite.insert(table)


def is_postgresql(session: Session) -> bool:
    """Whether the session's database is PostgreSQL, and not SQLite."""
    return session.get_bind().dialect.name == "postgresql"


def clock(session: Session) -> ColumnElement[datetime]:
    """The time that `optigpu.store.database.moment` asks for, as a part of another statement."""
    return func.clock_timestamp() if is_postgresql(session) else literal(utc_now(), UtcDateTime())


def newest_first(
    session: Session, query: Select[Row], key: QueryableAttribute[str], limit: int, cursor: str | None
) -> tuple[Sequence[Row], str | None]:
    """A page of rows by their ids, which begin with their time, and the cursor of the next one. Raises CursorError."""
    if cursor is not None:
        query = query.where(key < decode_cursor(cursor, str)[0])
    rows = session.scalars(query.order_by(key.desc()).limit(limit + 1)).all()
    return rows[:limit], encode_cursor(getattr(rows[limit - 1], key.key)) if len(rows) > limit else None


def before(cursor: str, at: Moment, key: QueryableAttribute[str]) -> ColumnElement[bool]:
    """The condition that holds for rows behind that of the cursor, the newest first. Raises CursorError."""
    text, id_ = decode_cursor(cursor, str, str)
    try:
        moment = datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise bad_cursor() from None
    return tuple_(at, key) < tuple_(literal(moment, UtcDateTime()), literal(id_))


def like_part(part: str) -> str:
    """The LIKE pattern, escaped by a backslash, of texts in lower case that contain `part`."""
    escaped = part.lower().replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def seconds_between(session: Session, earlier: Moment, later: Moment) -> ColumnElement[float]:
    """The length of a span in seconds, exact to a millisecond."""
    if is_postgresql(session):
        return cast(extract("epoch", later - earlier), Double)
    return (func.julianday(later) - func.julianday(earlier)) * 86400.0


def take_turns(session: Session, name: str) -> None:
    """Transactions that call this with the same name follow each other, as all that write do on SQLite."""
    if is_postgresql(session):
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        session.execute(select(func.pg_advisory_xact_lock(number)))
