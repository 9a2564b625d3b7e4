"""Which result of a place on the leaderboard is its current one: the best supported of the latest versions.

A place is a variant on a class of hardware, on one board. Its valid results with the latest versions come first, then
those without warnings, with more processes, and the newer ones: a careless rerun does not replace a careful
measurement. The others are the place's history; when the current result is withdrawn, the next one becomes current.

`pareto` marks current results of one board and device that no other beats: one that is as good in speed, memory,
quality and energy, and better in one. Missing quality or energy is the worst; without speed or memory it is null.

A transaction that changes a board's entries holds the board until it ends. Marks and counts are kept then, and are not
computed for each reader.
"""

import math
from collections.abc import Collection, Sequence

from sqlalchemy import and_, delete, func, select, update
from sqlalchemy.orm import Session

from optigpu.documents.result import Result
from optigpu.documents.views import Standing
from optigpu.store import alerts
from optigpu.store.database import Part, mark_changed
from optigpu.store.entries import entry_of, techniques_of
from optigpu.store.statements import insert_into, take_turns
from optigpu.store.tables import (
    BoardRow,
    EntryTechnique,
    KnownName,
    LeaderboardEntry,
    MetricRow,
    ResultRow,
)

Costs = tuple[float, float, float, float]
"""Less is better: the negated speed, bytes, Kullback-Leibler divergence, joules."""


def enter(session: Session, result: Result) -> None:
    """Enters a result that was just stored at its place, and tells the webhooks what they ask for."""
    entry = entry_of(result)
    take_turns(session, f"board {entry.board}")
    _enter_on_board(session, result, entry)
    session.add(entry)
    session.flush()  # its techniques refer to it
    names = dict.fromkeys(techniques_of(result))
    session.add_all(EntryTechnique(result_id=entry.result_id, name=name, board=entry.board) for name in names)
    # The names by which this entry can be found from now on.
    found = [
        ("backend", entry.backend),
        ("hardware", entry.hardware_class),
        ("model", entry.model),
        ("source", entry.source),
        *(("technique", name) for name in names),
        ("workload", entry.workload),
    ]
    rows = [{"filter": kind, "name": name} for kind, name in sorted(found, key=str) if name]
    session.execute(insert_into(session, KnownName).values(rows).on_conflict_do_nothing())
    if entry.standing is not Standing.INVALID:
        before = _settle(session, entry)
        _weigh(session, entry.board, entry.hardware_class)
        _mark_superseded(session, entry.board, entry.variant_digest)
        session.refresh(entry)
        alerts.look_for_regression(session, before, entry, result)
        alerts.look(session, entry, result)
    session.flush()
    mark_changed(session, Part.LEADERBOARD)


def remove(session: Session, result_ids: Collection[str]) -> None:
    """Removes results with all that belongs to them, and settles their places again."""
    entry = LeaderboardEntry
    on_boards = select(entry.board).where(entry.result_id.in_(result_ids)).distinct()
    boards = sorted(session.scalars(on_boards))
    for board in boards:
        take_turns(session, f"board {board}")
    gone = session.scalars(select(entry).where(entry.result_id.in_(result_ids))).all()
    for each in gone:
        session.expunge(each)  # what follows removes them by statements
    session.execute(delete(ResultRow).where(ResultRow.id.in_(result_ids)))
    for each in {_place_of(each): each for each in gone if each.standing is not Standing.INVALID}.values():
        _settle(session, each)
    for board, hardware in sorted({(each.board, each.hardware_class) for each in gone}):
        _weigh(session, board, hardware)
    for board, variant in sorted({(each.board, each.variant_digest) for each in gone}):
        _mark_superseded(session, board, variant)
    for number in boards:
        _leave_board(session, number, [each for each in gone if each.board == number])
    mark_changed(session, Part.LEADERBOARD)


def beats(one: Costs, other: Costs) -> bool:
    """Whether the first is as good in everything, and better in something."""
    return one != other and all(mine <= yours for mine, yours in zip(one, other, strict=True))


def costs_of(entry: LeaderboardEntry) -> Costs | None:
    """None if its speed or its memory is unknown."""
    if entry.score is None or entry.size_bytes is None:
        return None
    kld, joules = (math.inf if cost is None else cost for cost in (entry.kld, entry.energy_j))
    return -entry.score, entry.size_bytes, kld, joules


def _settle(session: Session, there: LeaderboardEntry) -> str | None:
    """Makes the best supported of the valid results at the place of an entry the current one; returns the result that
    it replaces, if it replaces one."""
    entry = LeaderboardEntry
    here = zip((entry.board, entry.variant_digest, entry.hardware_class), _place_of(there), strict=True)
    valid = and_(*(column == value for column, value in here)), entry.standing != Standing.INVALID
    best_first = (
        *(entry.age.desc(), (entry.warnings == "").desc(), entry.replicates.desc()),
        *(entry.measured_at.desc(), entry.result_id.desc()),
    )
    anew = {"populate_existing": True}
    best = session.scalars(
        select(entry).where(*valid).order_by(*best_first).limit(1), execution_options=anew
    ).one_or_none()
    if best is None:
        return None
    others = select(entry).where(
        *valid, entry.standing == Standing.CURRENT, entry.result_id != best.result_id
    )
    other = session.scalars(others, execution_options=anew).one_or_none()
    if other is not None:
        other.earlier, other.pareto = 0, None
        _stand(session, other, Standing.EARLIER)
    count = select(func.count()).select_from(entry).where(*valid)
    best.earlier = session.execute(count).scalar_one() - 1
    _stand(session, best, Standing.CURRENT)
    return other.result_id if other and other is not there else None


def _stand(session: Session, entry: LeaderboardEntry, standing: Standing) -> None:
    if entry.standing is not standing:
        entry.standing = standing
        of_result = MetricRow.result_id == entry.result_id
        session.execute(update(MetricRow).where(of_result).values(standing=standing))
    session.flush()


def _weigh(session: Session, board: int, hardware_class: str) -> None:
    """Marks which of the current results of each device there no other beats."""
    query = select(LeaderboardEntry).where(
        LeaderboardEntry.board == board,
        LeaderboardEntry.hardware_class == hardware_class,
        LeaderboardEntry.standing == Standing.CURRENT,
    )
    weighed = [
        (costs, each)
        for each in session.scalars(query, execution_options={"populate_existing": True})
        if (costs := costs_of(each)) is not None
    ]
    fronts: dict[str, list[Costs]] = {}
    for costs, each in sorted(weighed, key=lambda both: both[0]):  # none is beaten by one that follows it
        front = fronts.setdefault(each.device, [])
        each.pareto = not any(beats(other, costs) for other in front)
        if each.pareto:
            front.append(costs)
    session.flush()


def _mark_superseded(session: Session, board: int, variant: str) -> None:
    """Marks the valid results of a variant of which a later version was measured on other hardware."""
    entry = LeaderboardEntry
    valid = entry.board == board, entry.variant_digest == variant, entry.standing != Standing.INVALID
    ages: dict[str, bytes] = {}
    for hardware, age in session.execute(select(entry.hardware_class, entry.age).where(*valid).distinct()):
        ages[hardware] = max(ages.get(hardware, b""), age)
    for hardware in ages:
        latest = max((ages[each] for each in ages if each != hardware), default=b"")
        here = *valid, entry.hardware_class == hardware, entry.superseded != (entry.age < latest)
        session.execute(update(entry).where(*here).values(superseded=entry.age < latest))


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


def _place_of(entry: LeaderboardEntry) -> tuple[int, str, str]:
    """A board, a variant, a class of hardware."""
    return entry.board, entry.variant_digest, entry.hardware_class
