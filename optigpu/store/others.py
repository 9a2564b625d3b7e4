"""What other tools measured: files of theirs that were imported. They are no results and stand on no board."""

import hashlib

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from optigpu.documents.others import MOST_FILES, OthersFile, OthersView
from optigpu.documents.queries import LeaderboardQuery
from optigpu.store.database import Part, mark_changed, moment, row_of
from optigpu.store.statements import insert_into
from optigpu.store.tables import OthersRow
from optigpu.vocabulary import Document, Frozen, canonical_json, new_id


class AddedFile(Frozen):
    """A file that was posted. `created` is False when the same had been posted before."""

    file: OthersView
    created: bool


def add(session: Session, file: OthersFile) -> AddedFile:
    """Enters a file, once."""
    document = file.model_dump(mode="json")
    digest = hashlib.sha256(canonical_json(document).encode()).hexdigest()
    row = {"id": new_id(), "digest": digest, "imported_at": moment(session), "document": document}
    insert = insert_into(session, OthersRow).values(row).on_conflict_do_nothing(index_elements=["digest"])
    created = session.scalars(insert.returning(OthersRow.id)).one_or_none() is not None
    if created:
        mark_changed(session, Part.LEADERBOARD)
    stored = session.scalars(select(OthersRow).where(OthersRow.digest == digest)).one()
    view = OthersView(**vars(file), id=stored.id, imported_at=stored.imported_at)
    return AddedFile(file=view, created=created)


def remove(session: Session, file_id: str) -> None:
    """Removes a file. Raises NotFoundError."""
    session.delete(row_of(session, OthersRow, "file of another tool", file_id))
    mark_changed(session, Part.LEADERBOARD)


def read(connection: Connection, query: LeaderboardQuery) -> list[Document]:
    """An `OthersView` of each file that a query asks for, the newest first; of a metric, the rows that have it."""
    table = OthersRow.__table__
    found: list[Document] = []
    for row in connection.execute(select(table).order_by(table.c.id.desc())):
        document = row.document
        if query.model is not None and query.model.lower() not in (document["model"] or "").lower():
            continue
        rows = [each for each in document["rows"] if _has(each, query.metric)]
        if rows:
            found.append({**document, "rows": rows, "id": row.id, "imported_at": row.imported_at})
        if len(found) == MOST_FILES:
            break
    return found


def _has(row: Document, metric: str | None) -> bool:
    return metric is None or any(figure["metric"] == metric for figure in row["figures"])
