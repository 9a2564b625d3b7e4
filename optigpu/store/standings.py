"""Which result of a place on the leaderboard is its current one: the best supported of the latest versions.

A place is a variant on a class of hardware, on one board. Of its valid results those with the latest versions count; of
these one without warnings before one with, then the one with more processes, then the newer one. So a careless rerun
does not take the place of a careful measurement. The others are the place's history: withdrawing the current result
brings the next one back.

Whoever changes entries of a board holds the board until the transaction ends, so that each sees what the one before has
left: flags and counts are kept as entries come and go, and are not computed for each reader.
"""

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, delete, func, select, update
from sqlalchemy.orm import Session

from optigpu.documents.result import Result
from optigpu.documents.views import Standing
from optigpu.store import alerts, pareto, regressions, revisions
from optigpu.store.entries import entry_of, techniques_of
from optigpu.store.revisions import Part
from optigpu.store.statements import insert_into, take_turns
from optigpu.store.tables import (
    BoardRow,
    EntryTechnique,
    KnownName,
    LeaderboardEntry,
    MetricRow,
    ResultRow,
)


class Place(NamedTuple):
    """A variant on a class of hardware, on one board."""

    board: int
    variant_digest: str
    hardware_class: str


def enter(session: Session, result: Result) -> None:
    """Enters a result that was just stored at its place, and tells the webhooks what they ask for."""
    entry = entry_of(result)
    _hold(session, [entry.board])
    _enter_on_board(session, result, entry)
    session.add(entry)
    session.flush()  # its techniques refer to it
    names = dict.fromkeys(techniques_of(result))
    session.add_all(EntryTechnique(result_id=entry.result_id, name=name, board=entry.board) for name in names)
    _know(session, entry, names)
    if entry.standing is not Standing.INVALID:
        before = _seat(session, entry)
        _supersede(session, entry)
        regressions.look(session, before, result)
        alerts.look(session, entry, result)
    session.flush()
    revisions.changed(session, Part.LEADERBOARD)


def remove(session: Session, result_ids: Collection[str]) -> None:
    """Removes results with all that belongs to them, and settles their places again."""
    entry = LeaderboardEntry
    on_boards = select(entry.board).where(entry.result_id.in_(result_ids)).distinct()
    boards = sorted(session.scalars(on_boards))
    _hold(session, boards)
    gone = session.scalars(select(entry).where(entry.result_id.in_(result_ids))).all()
    for each in gone:
        session.expunge(each)  # what follows removes them by statements
    session.execute(delete(ResultRow).where(ResultRow.id.in_(result_ids)))
    for each in gone:
        left = pareto.group_of(each), pareto.costs_of(each)
        pareto.went(session, *left, was_on_front=each.pareto is True)
    for place in sorted({_place_of(each) for each in gone if each.standing is not Standing.INVALID}):
        _seat_again(session, place)
    for board, variant in sorted({(each.board, each.variant_digest) for each in gone}):
        _supersede_again(session, board, variant)
    for number in boards:
        _leave_board(session, number, [each for each in gone if each.board == number])
    revisions.changed(session, Part.LEADERBOARD)


def _hold(session: Session, boards: Iterable[int]) -> None:
    for board in boards:
        take_turns(session, f"board {board}")


def _seat(session: Session, entry: LeaderboardEntry) -> str | None:
    """Compares the entry with the current one of its place; returns the result that it replaces, if it replaces one."""
    here = _at(_place_of(entry)), LeaderboardEntry.standing == Standing.CURRENT
    query = select(LeaderboardEntry).where(*here)
    before = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    if before is not None and _support(before) > _support(entry):
        before.earlier += 1
        return None
    if before is not None:
        entry.earlier, before.earlier = before.earlier + 1, 0
        was_on_front, before.pareto = before.pareto is True, None
        _stand(session, before, Standing.EARLIER)
        pareto.went(session, pareto.group_of(before), pareto.costs_of(before), was_on_front=was_on_front)
    _stand(session, entry, Standing.CURRENT)
    pareto.came(session, entry)
    session.flush()
    return before.result_id if before else None


def _seat_again(session: Session, place: Place) -> None:
    """Makes the best supported of the valid results that are left the current one."""
    entry = LeaderboardEntry
    valid = _at(place), entry.standing != Standing.INVALID
    best_first = (
        *(entry.age.desc(), (entry.warnings == "").desc(), entry.replicates.desc()),
        *(entry.measured_at.desc(), entry.result_id.desc()),
    )
    query = select(entry).where(*valid).order_by(*best_first).limit(1)
    best = session.scalars(query, execution_options={"populate_existing": True}).one_or_none()
    if best is None:
        return
    best.earlier = session.execute(select(func.count()).select_from(entry).where(*valid)).scalar_one() - 1
    if best.standing is not Standing.CURRENT:
        _stand(session, best, Standing.CURRENT)
        pareto.came(session, best)
    session.flush()


def _stand(session: Session, entry: LeaderboardEntry, standing: Standing) -> None:
    entry.standing = standing
    session.flush()
    of_result = MetricRow.result_id == entry.result_id
    session.execute(update(MetricRow).where(of_result).values(standing=standing))


def _supersede(session: Session, entry: LeaderboardEntry) -> None:
    """Marks what the entry supersedes, and itself if a later version was measured on other hardware before."""
    other = LeaderboardEntry
    elsewhere = _elsewhere(entry.board, entry.variant_digest, entry.hardware_class)
    later = session.scalars(select(other.result_id).where(*elsewhere, other.age > entry.age).limit(1)).first()
    entry.superseded = later is not None
    older = *elsewhere, other.age < entry.age, other.superseded.is_(False)
    session.execute(update(other).where(*older).values(superseded=True))


def _supersede_again(session: Session, board: int, variant: str) -> None:
    """Computes the mark again for all valid results of a variant."""
    other = LeaderboardEntry
    valid = other.board == board, other.variant_digest == variant, other.standing != Standing.INVALID
    ages: dict[str, bytes] = {}
    for hardware, age in session.execute(select(other.hardware_class, other.age).where(*valid).distinct()):
        ages[hardware] = max(ages.get(hardware, b""), age)
    for hardware in ages:
        latest = max((ages[each] for each in ages if each != hardware), default=b"")
        here = *valid, other.hardware_class == hardware
        session.execute(update(other).where(*here).values(superseded=other.age < latest))


def _elsewhere(board: int, variant: str, hardware: str) -> tuple[ColumnElement[bool], ...]:
    """The valid results of a variant on other hardware."""
    other = LeaderboardEntry
    return (
        other.board == board,
        other.variant_digest == variant,
        other.hardware_class != hardware,
        other.standing != Standing.INVALID,
    )


def _enter_on_board(session: Session, result: Result, entry: LeaderboardEntry) -> None:
    board = session.get(BoardRow, entry.board, populate_existing=True)
    if board is None:
        board = BoardRow(
            number=entry.board,
            workload_digest=result.variant.workload_digest,
            source=entry.source,
            workload=entry.workload,
            model=entry.model,
            primary_metric=result.variant.primary_metric,
            document=result.variant.workload,
            newest=entry.result_id,
            invalid={},
        )
        session.add(board)
    board.newest = max(board.newest, entry.result_id)
    if entry.standing is Standing.INVALID:
        board.invalid = board.invalid | {entry.reasons: board.invalid.get(entry.reasons, 0) + 1}
    session.flush()


def _leave_board(session: Session, number: int, gone: Sequence[LeaderboardEntry]) -> None:
    """Counts off what is gone; a board without results is removed."""
    board = session.get_one(BoardRow, number, populate_existing=True)
    left = select(func.max(LeaderboardEntry.result_id)).where(LeaderboardEntry.board == number)
    newest: str | None = session.execute(left).scalar_one()
    if newest is None:
        session.delete(board)
    else:
        counts = dict(board.invalid)
        for each in gone:
            if each.standing is Standing.INVALID:
                counts[each.reasons] -= 1
        board.newest, board.invalid = newest, {reasons: count for reasons, count in counts.items() if count}
    session.flush()


def _know(session: Session, entry: LeaderboardEntry, techniques: Iterable[str]) -> None:
    """The names by which this entry can be found from now on."""
    found = [
        ("backend", entry.backend),
        ("hardware", entry.hardware_class),
        ("model", entry.model),
        ("source", entry.source),
        *(("technique", name) for name in techniques),
        ("workload", entry.workload),
    ]
    rows = [{"filter": kind, "name": name} for kind, name in sorted(found, key=str) if name]
    session.execute(insert_into(session, KnownName).values(rows).on_conflict_do_nothing())


def _place_of(entry: LeaderboardEntry) -> Place:
    return Place(entry.board, entry.variant_digest, entry.hardware_class)


def _at(place: Place) -> ColumnElement[bool]:
    """The entries of a place."""
    return and_(
        LeaderboardEntry.board == place.board,
        LeaderboardEntry.variant_digest == place.variant_digest,
        LeaderboardEntry.hardware_class == place.hardware_class,
    )


def _support(entry: LeaderboardEntry) -> tuple[bytes, bool, int, datetime, str]:
    """What the best supported result has the most of, the weightiest first."""
    return entry.age, not entry.warnings, entry.replicates, entry.measured_at, entry.result_id
