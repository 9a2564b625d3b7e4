"""Parameters that several calls share."""

from typing import Annotated

from fastapi import Path
from pydantic import AfterValidator, Field, WithJsonSchema

from optigpu.vocabulary import is_id


def _canonical(text: str) -> str:
    if not is_id(text):
        raise ValueError("This is not a UUID; an id looks like 0198c9a2-7b3e-7cc1-8f5d-2f0c1d1f6a11.")
    return text.lower()


Uuid = Annotated[str, AfterValidator(_canonical), WithJsonSchema({"type": "string", "format": "uuid"})]
Id = Annotated[Uuid, Path(alias="id", description="A UUID, as the call that made it returned it.")]

PRINTABLE = r"^[^\x00-\x1f\x7f]+$"
Text = Annotated[str, Field(max_length=200, pattern=PRINTABLE)]
"""A word to filter by: no control characters, which not every database takes."""

Cursor = Annotated[
    str, Field(max_length=500, pattern=PRINTABLE, description="`next_cursor` of the page before.")
]
Limit = Annotated[int, Field(ge=1, le=200, description="The largest number of rows to return.")]
