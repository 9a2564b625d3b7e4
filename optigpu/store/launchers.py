"""The launchers, which hand jobs to schedulers: when each was seen, and why it can hand over nothing, if so."""

from datetime import timedelta

from sqlalchemy.orm import Session

from optigpu.store.database import moment
from optigpu.store.statements import insert_into
from optigpu.store.tables import LauncherRow
from optigpu.vocabulary import Scheduler

ALIVE = timedelta(minutes=2)
"""A scheduler may take a while to answer."""


def seen(session: Session, scheduler: Scheduler, problem: str | None) -> None:
    """The launcher is alive. `problem` is a sentence: why it can hand over nothing now; None if it can."""
    row = {"scheduler": scheduler, "seen_at": moment(session), "problem": problem}
    changes = {name: value for name, value in row.items() if name != "scheduler"}
    session.execute(
        insert_into(session, LauncherRow)
        .values(row)
        .on_conflict_do_update(index_elements=["scheduler"], set_=changes)
    )


def problem_of(session: Session, scheduler: Scheduler) -> str | None:
    """Why jobs for this scheduler are not handed over now, in a sentence; None if they are."""
    row = session.get(LauncherRow, scheduler, populate_existing=True)
    if row is None or row.seen_at < moment(session) - ALIVE:
        start = f"`python -m worker --launch {scheduler}`"
        return f"No launcher for {scheduler} is alive. Start one beside the scheduler: {start}."
    return row.problem
