"""What the leaderboard can be filtered by, and the names that a filter can have."""

from collections import defaultdict

from sqlalchemy import exists, literal, or_, select, union
from sqlalchemy.orm import Session

from optigpu.documents.views import Standing
from optigpu.store.board_statements import Values
from optigpu.store.statements import like_part
from optigpu.store.tables import BoardRow, KnownName, Worker
from optigpu.vocabulary import Frozen

DIGEST_LENGTH = 64
_KNOWN = union(select(KnownName.filter, KnownName.name), select(literal("hardware"), Worker.hardware_class))


class LeaderboardQuery(Frozen):
    """What to list. None leaves a filter out.

    `workload` is a kind, or a workload's digest, which selects one board; `hardware` is part of a hardware class, in
    any case of letters; `technique` must be in the stack. `min_top1` (a share, of `top1_agreement`) and `max_kld`
    (nats, of `kld_mean`) leave out what is worse, and what has no such figure; `clean` leaves out what has warnings,
    `pareto` what another row of the same hardware beats, `best` all but the first row of each class of hardware.
    `include_invalid` and `include_history` add invalid and earlier results after the current ones, without a rank.
    Without a `metric` each board is ranked by the primary metric of its workload. Sources are never mixed: a device's
    own report is not ranked with a worker's. `limit` is the largest number of rows of each board.
    """

    metric: str | None = None
    workload: str | None = None
    model: str | None = None
    hardware: str | None = None
    technique: str | None = None
    backend: str | None = None
    min_top1: float | None = None
    max_kld: float | None = None
    clean: bool = False
    pareto: bool = False
    best: bool = False
    include_invalid: bool = False
    include_history: bool = False
    source: str = "worker"
    limit: int | None = None
    cursor: str | None = None

    @property
    def standings(self) -> list[Standing]:
        """Which results are listed."""
        added = {Standing.EARLIER: self.include_history, Standing.INVALID: self.include_invalid}
        return [standing for standing in Standing if added.get(standing, True)]


def of_board(query: LeaderboardQuery, after: str | None) -> Values:
    """What a board has to be: the filters of board_statements.OF_BOARD that are set."""
    by_digest = query.workload is not None and len(query.workload) == DIGEST_LENGTH
    asked = {
        "source": query.source,
        "workload": None if by_digest else query.workload,
        "digest": query.workload if by_digest else None,
        "model": query.model,
        "after": after,
    }
    return {name: value for name, value in asked.items() if value is not None}


def of_entry(query: LeaderboardQuery) -> Values:
    """What an entry of such a board has to be, whatever its standing and its warnings: the same of OF_ENTRY, and for
    OF_METRIC the stack."""
    technique = query.technique and query.technique.lower()
    asked = {
        "hardware": query.hardware and like_part(query.hardware),
        "technique": technique,
        "in_stack": technique and like_part(f" {technique} "),
        "backend": query.backend,
        "min_top1": query.min_top1,
        "max_kld": query.max_kld,
        "pareto": query.pareto or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def workloads(session: Session) -> list[str]:
    """The kinds of workload that results have had, sorted."""
    return _known(session, "workload")


def has_workload(session: Session, workload: str) -> bool:
    """Whether a result has this kind of workload, or this workload's digest."""
    named = or_(BoardRow.workload_digest == workload, BoardRow.workload == workload)
    return session.scalar(select(exists().where(named))) or False


def models(session: Session) -> list[str]:
    """The models that results have had, sorted."""
    return _known(session, "model")


def techniques(session: Session) -> list[str]:
    """The techniques in the stacks of results, sorted."""
    return _known(session, "technique")


def backends(session: Session) -> list[str]:
    """The backends that results have had, sorted."""
    return _known(session, "backend")


def sources(session: Session) -> list[str]:
    """Where results have come from, sorted."""
    return _known(session, "source")


def known(session: Session) -> dict[str, list[str]]:
    """The names of each filter, sorted."""
    found: dict[str, list[str]] = defaultdict(list)
    for filter_, name in sorted(session.connection().execute(_KNOWN)):
        found[filter_].append(name)
    return found


def _known(session: Session, filter_: str) -> list[str]:
    return sorted(session.scalars(select(KnownName.name).where(KnownName.filter == filter_)))
