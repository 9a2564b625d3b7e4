"""The forms in which a table is sent: JSON, CSV or Markdown, as the query or the header Accept asks for."""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from fastapi import Response

from optigpu.documents.devices import EdgePage
from optigpu.documents.views import LeaderboardPage
from optigpu.store.statements import newest_of

if TYPE_CHECKING:
    from optigpu.report.formats import Grid

Page = TypeVar("Page", LeaderboardPage, EdgePage)


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


def written(
    page: Page, form: Form, to_csv: Callable[[Page], str], to_grids: Callable[[Page], "Iterable[Grid]"]
) -> Response:
    """The page in this form."""
    from optigpu.report.formats import markdown

    match form:
        case Form.CSV:
            return Response(to_csv(page), media_type="text/csv")
        case Form.MARKDOWN:
            return Response("\n".join(map(markdown, to_grids(page))), media_type="text/markdown")
        case Form.JSON:
            return Response(page.model_dump_json(), media_type="application/json")


def next_cursor(of_boards: Sequence[str | None], of_list: str | None, cursor: str | None) -> str | None:
    """Of the boards that follow, or of the rows that follow where one board is read and not the end of a list."""
    return of_boards[0] if len(of_boards) == 1 and newest_of(cursor) is None else of_list


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
