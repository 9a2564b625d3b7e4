"""What has changed since: a part of the database has another revision after each transaction that changed it.

Whoever keeps what was read, keeps the revision with it, and asks for the revision alone the next time. A revision is
random, so that a database that was restored from a backup never has one again that stood for something else.
"""

from collections.abc import Mapping
from enum import StrEnum

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session

from optigpu.store.statements import insert_into
from optigpu.store.tables import Revision
from optigpu.vocabulary import new_id


class Part(StrEnum):
    """A part of the database that has revisions."""

    KEYS = "keys"
    LEADERBOARD = "leaderboard"


Revisions = Mapping[str, str]
"""By part; a part that never changed has none."""


def changed(session: Session, part: Part) -> None:
    """This transaction changes the part: `renew` gives it another revision when the transaction ends."""
    session.info.setdefault(Part, set()).add(part)


def renew(session: Session) -> None:
    """Gives each part that changed its new revision.

    It is the last statement of a transaction: whoever else changes the part waits for the commit. In the order of the
    names, so that no two transactions wait for each other.
    """
    for part in sorted(session.info.pop(Part, ())):
        row = insert_into(session, Revision).values(part=part, revision=new_id())
        session.execute(
            row.on_conflict_do_update(index_elements=["part"], set_={"revision": row.excluded.revision})
        )


def current(connection: Connection) -> Revisions:
    """The revisions as they are now. Every call waits for this, and a session takes twice as long."""
    return dict(connection.execute(_CURRENT).all())


_CURRENT = select(Revision.part, Revision.revision)
