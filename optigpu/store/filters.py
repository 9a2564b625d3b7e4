"""What the leaderboard can be filtered by, as conditions on its entries, and the names that a filter can have."""

import math
from collections.abc import Iterable

from sqlalchemy import ColumnElement, exists, or_, select
from sqlalchemy.orm import Session, aliased

from optigpu.documents.views import Standing
from optigpu.store import workers
from optigpu.store.tables import BoardRow, EntryTechnique, KnownName, LeaderboardEntry, MetricRow
from optigpu.vocabulary import Frozen

DIGEST_LENGTH = 64


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


def of_board(query: LeaderboardQuery) -> Iterable[ColumnElement[bool]]:
    """What a board has to be."""
    yield BoardRow.source == query.source
    if query.workload is not None:
        by_digest = len(query.workload) == DIGEST_LENGTH
        yield (BoardRow.workload_digest if by_digest else BoardRow.workload) == query.workload
    if query.model is not None:
        yield BoardRow.model == query.model


def of_entry(session: Session, query: LeaderboardQuery) -> tuple[ColumnElement[bool], ...]:
    """What an entry of such a board has to be, whatever its standing, its warnings and its metrics."""
    return tuple(_of_entry(session, query))


def _of_entry(session: Session, query: LeaderboardQuery) -> Iterable[ColumnElement[bool]]:
    if query.hardware is not None:
        part = query.hardware.lower()
        yield LeaderboardEntry.hardware_class.in_(
            [name for name in _known(session, "hardware") if part in name.lower()]
        )
    if query.technique is not None:
        yield exists().where(
            EntryTechnique.result_id == LeaderboardEntry.result_id,
            EntryTechnique.name == query.technique.lower(),
        )
    if query.backend is not None:
        yield LeaderboardEntry.backend == query.backend
    if query.pareto:
        yield LeaderboardEntry.pareto.is_(True)
    if query.min_top1 is not None:
        yield has_metric("top1_agreement", query.min_top1, math.inf)
    if query.max_kld is not None:
        yield has_metric("kld_mean", -math.inf, query.max_kld)


def has_metric(metric: str, low: float = -math.inf, high: float = math.inf) -> ColumnElement[bool]:
    """The entry's result has this metric, within these bounds."""
    figure = aliased(MetricRow)
    return exists().where(
        figure.result_id == LeaderboardEntry.result_id,
        figure.name == metric,
        figure.value.between(low, high),
    )


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


def hardware(session: Session) -> list[str]:
    """The classes of hardware that serve or have had results, sorted."""
    return workers.hardware_classes(session)


def _known(session: Session, filter_: str) -> list[str]:
    return sorted(session.scalars(select(KnownName.name).where(KnownName.filter == filter_)))
