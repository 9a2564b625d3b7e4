"""The reports that stand on the edge leaderboard, by partition, and the results of workers that are shown beside them.
`device_reports` says which report of a device stands."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from optigpu.documents.devices import DeviceReportView, InputSource, RunnerName
from optigpu.documents.views import RowFacts, Standing
from optigpu.store.tables import Device, DeviceReportRow, EdgeModel, EdgeStanding, LeaderboardEntry
from optigpu.vocabulary import Document, Frozen


class EdgeFilters(Frozen):
    """Which reports to list. None leaves a filter out. `model` is the beginning of a file's SHA-256."""

    model: str | None = None
    board: str | None = None
    input: InputSource | None = None
    runner: RunnerName | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        """What a standing and its report have to be."""
        if self.model is not None:
            yield EdgeStanding.model_sha256.startswith(self.model.lower(), autoescape=True)
        if self.input is not None:
            yield EdgeStanding.input_source == self.input
        if self.runner is not None:
            yield EdgeStanding.runner == self.runner
        if self.board is not None:
            yield DeviceReportRow.board == self.board


def models(session: Session) -> list[str]:
    """The files of models that the service knows or has reports of, sorted."""
    known = session.scalars(select(EdgeModel.sha256)).all()
    return sorted({*known, *session.scalars(select(EdgeStanding.model_sha256).distinct())})


def boards(session: Session) -> list[str]:
    """The boards of standing reports, sorted."""
    standing = select(DeviceReportRow.board).join(EdgeStanding, EdgeStanding.report_id == DeviceReportRow.id)
    return sorted(set(session.scalars(standing.distinct())))


class Partition(NamedTuple):
    """What devices of a board have in common."""

    model_sha256: str
    input_source: InputSource
    runner: RunnerName


def partitions(
    session: Session,
    filters: EdgeFilters,
    *,
    only: Partition | None = None,
    after: str | None = None,
    limit: int,
) -> Sequence[tuple[Partition, str]]:
    """The partitions with a standing report and the id of its newest one, which begins with its time: the newest first,
    those that follow the id `after`."""
    newest = func.max(EdgeStanding.report_id).label("newest")
    columns = (EdgeStanding.model_sha256, EdgeStanding.input_source, EdgeStanding.runner)
    statement = (
        select(*columns, newest)
        .join(DeviceReportRow, DeviceReportRow.id == EdgeStanding.report_id)
        .where(*filters.conditions(), *(_within(only) if only else ()))
        .group_by(*columns)
        .order_by(newest.desc())
        .limit(limit)
    )
    if after is not None:
        statement = statement.having(newest < after)
    return [(Partition(*row[:3]), row.newest) for row in session.execute(statement)]


def _within(partition: Partition) -> tuple[ColumnElement[bool], ...]:
    return (
        EdgeStanding.model_sha256 == partition.model_sha256,
        EdgeStanding.input_source == partition.input_source,
        EdgeStanding.runner == partition.runner,
    )


def standing(
    session: Session, filters: EdgeFilters, partition: Partition
) -> Iterator[tuple[DeviceReportView, str | None, bool]]:
    """Of each device the report that ranks, and the newest that does not; with the device's name, and whether it was
    revoked."""
    statement = (
        select(DeviceReportRow, Device)
        .join(EdgeStanding, DeviceReportRow.id == EdgeStanding.report_id)
        .join(Device, Device.id == EdgeStanding.device_id)
        .where(*_within(partition), *filters.conditions())
    )
    for report, device in session.execute(statement):
        yield report.as_view(DeviceReportView), device.name, device.revoked_at is not None


IMAGES = "classify"
"""The workload that devices run."""
MOST_RESULTS = 2000
"""The newest of the current results of that workload that are looked at."""


class ImageResult(NamedTuple):
    """A worker's result of an image classifier, with what is compared with devices."""

    shown: RowFacts
    edge: Document


def image_results(session: Session) -> list[ImageResult]:
    """The newest current results of image classifiers that workers measured."""
    query = select(LeaderboardEntry.shown, LeaderboardEntry.edge).where(
        LeaderboardEntry.workload == IMAGES,
        LeaderboardEntry.standing == Standing.CURRENT,
        LeaderboardEntry.source == "worker",
    )
    found = session.execute(query.order_by(LeaderboardEntry.result_id.desc()).limit(MOST_RESULTS))
    return [ImageResult(RowFacts.model_validate(shown), edge or {}) for shown, edge in found]
