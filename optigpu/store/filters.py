"""What the leaderboard can be filtered by, as conditions on its entries, and the names that a filter can have."""

import math
from collections.abc import Iterable

from sqlalchemy import ColumnElement, SQLColumnExpression, exists, func, select
from sqlalchemy.orm import Session, aliased

from optigpu.documents.views import Standing
from optigpu.store import workers
from optigpu.store.tables import LeaderboardEntry, MetricRow
from optigpu.vocabulary import Frozen

DIGEST_LENGTH = 64


class LeaderboardQuery(Frozen):
    """What to list. None leaves a filter out.

    `workload` is a kind, or a workload's digest, which selects one board; `hardware` is part of a hardware class, in
    any case of letters; `technique` must be in the stack. `min_top1` (a share, of `top1_agreement`) and `max_kld`
    (nats, of `kld_mean`) leave out what is worse, and what has no such figure; `clean` leaves out what has warnings.
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


def conditions(query: LeaderboardQuery) -> Iterable[ColumnElement[bool]]:
    """What an entry has to be, whatever its standing and its warnings."""
    yield LeaderboardEntry.source == query.source
    if query.metric is not None:
        yield _measured(query.metric, -math.inf, math.inf)
    if query.workload is not None:
        yield _workload(query.workload)
    if query.model is not None:
        yield LeaderboardEntry.model == query.model
    if query.hardware is not None:
        yield func.lower(LeaderboardEntry.hardware_class).contains(query.hardware.lower(), autoescape=True)
    if query.technique is not None:
        yield LeaderboardEntry.techniques.contains(f"|{query.technique.lower()}|", autoescape=True)
    if query.backend is not None:
        yield LeaderboardEntry.backend == query.backend
    if query.min_top1 is not None:
        yield _measured("top1_agreement", query.min_top1, math.inf)
    if query.max_kld is not None:
        yield _measured("kld_mean", -math.inf, query.max_kld)


def workloads(session: Session) -> list[str]:
    """The kinds of workload that results have, sorted."""
    return _distinct(session, LeaderboardEntry.workload)


def has_workload(session: Session, workload: str) -> bool:
    """Whether a result has this kind of workload, or this workload's digest."""
    return session.scalar(select(exists().where(_workload(workload)))) or False


def models(session: Session) -> list[str]:
    """The models that results have, sorted."""
    return _distinct(session, LeaderboardEntry.model)


def techniques(session: Session) -> list[str]:
    """The techniques in the stacks of results, sorted."""
    stacks = _distinct(session, LeaderboardEntry.techniques)
    return sorted({name for stack in stacks for name in stack.strip("|").split("|") if name})


def backends(session: Session) -> list[str]:
    """The backends that results have, sorted."""
    return _distinct(session, LeaderboardEntry.backend)


def sources(session: Session) -> list[str]:
    """Where results come from, sorted."""
    return _distinct(session, LeaderboardEntry.source)


def hardware(session: Session) -> list[str]:
    """The classes of hardware that serve or have results, sorted."""
    return workers.hardware_classes(session)


def _distinct(
    session: Session, column: SQLColumnExpression[str] | SQLColumnExpression[str | None]
) -> list[str]:
    return sorted(name for name in session.scalars(select(column).distinct()) if name)


def _workload(workload: str) -> ColumnElement[bool]:
    by_digest = len(workload) == DIGEST_LENGTH
    return (LeaderboardEntry.workload_digest if by_digest else LeaderboardEntry.workload) == workload


def _measured(metric: str, low: float, high: float) -> ColumnElement[bool]:
    """The entry's result has this metric, within these bounds."""
    figure = aliased(MetricRow)
    return exists().where(
        figure.result_id == LeaderboardEntry.result_id,
        figure.name == metric,
        figure.value.between(low, high),
    )
