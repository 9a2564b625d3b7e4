"""The models that edge devices report on, the runs that they began, their reports, and which of these are ranked.

Each report is stored once, with what was made of it. Whoever writes one has locked the device (`devices.enter`). A
place on the edge leaderboard is a device with one model's file, source of inputs and runner. It keeps two reports: the
one that ranks, the best supported of the latest setup, and the newest that does not. Results of workers are shown
beside the reports that stand.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, exists, func, select
from sqlalchemy.orm import Session

from optigpu.documents.devices import (
    DeviceReport,
    DeviceReportPage,
    DeviceReportView,
    DeviceSource,
    EdgeModelView,
    Flag,
    InputSource,
    Reason,
    ReportAnswer,
    ReportState,
    RunnerName,
)
from optigpu.documents.manifest import ModelManifest
from optigpu.documents.views import RowFacts, Standing
from optigpu.job.spec import digest
from optigpu.store.database import moment
from optigpu.store.devices import DeviceRequest
from optigpu.store.statements import insert_into, newest_first
from optigpu.store.tables import Device, DeviceReportRow, DeviceRun, EdgeModel, EdgeStanding, LeaderboardEntry
from optigpu.vocabulary import ConflictError, Document, Frozen, canonical_json, new_id


class AddedModel(Frozen):
    """A model that was posted. `created` is False when the same manifest had been posted before."""

    model: EdgeModelView
    created: bool


def add_model(session: Session, manifest: ModelManifest) -> AddedModel:
    """Enters a model. Raises ConflictError if another manifest is known for the same file."""
    document = manifest.model_dump(mode="json", by_alias=True)
    row = {"sha256": manifest.sha256, "rankable": manifest.rankable, "document": document}
    insert = insert_into(session, EdgeModel).values(row | {"added_at": moment(session)})
    insert = insert.on_conflict_do_nothing(index_elements=["sha256"])
    created = session.scalars(insert.returning(EdgeModel.sha256)).one_or_none() is not None
    stored = session.get_one(EdgeModel, manifest.sha256)
    if canonical_json(stored.document) != canonical_json(document):
        raise ConflictError(
            f"Another manifest of the model {manifest.sha256} is known; a manifest that reports were judged by stays."
        )
    return AddedModel(model=stored.as_view(EdgeModelView, manifest=stored.document), created=created)


def manifest_of(session: Session, sha256: str) -> ModelManifest | None:
    """The manifest of a model; None if it is not known. It is read once a session: a message has many reports."""
    known: dict[str, ModelManifest] = session.info.setdefault("edge_manifests", {})
    if sha256 not in known:
        row = session.get(EdgeModel, sha256)
        if row is None:
            return None
        known[sha256] = ModelManifest.model_validate(row.document)
    return known[sha256]


def list_models(session: Session) -> list[EdgeModelView]:
    """Every model, newest first."""
    rows = session.scalars(select(EdgeModel).order_by(EdgeModel.added_at.desc(), EdgeModel.sha256))
    return [row.as_view(EdgeModelView, manifest=row.document) for row in rows]


def document_of(session: Session, sha256: str) -> Document | None:
    """A model's manifest as it was stored; None if it is not known."""
    row = session.get(EdgeModel, sha256)
    return row.document if row else None


class StartedRun(Frozen):
    """A run whose start the server saw. `reported` says that a report about it is stored."""

    id: str
    started_at: datetime
    boot_id: str
    model_sha256: str
    reported: bool = False


class JudgedReport(Frozen):
    """A report with what was made of it."""

    report: DeviceReport
    source: DeviceSource
    state: ReportState
    ranked: bool
    reasons: tuple[Reason, ...]
    flags: tuple[Flag, ...]


def start_run(session: Session, request: DeviceRequest, model_sha256: str) -> StartedRun:
    """Enters the start of a run, once for a repeated request. Raises ConflictError if that began another model's."""
    query = select(DeviceRun).where(
        DeviceRun.device_id == request.device_id,
        DeviceRun.boot_id == request.boot_id,
        DeviceRun.sequence == request.sequence,
    )
    row = session.scalars(query).one_or_none()
    if row is None:
        row = DeviceRun(
            id=new_id(),
            device_id=request.device_id,
            boot_id=request.boot_id,
            sequence=request.sequence,
            model_sha256=model_sha256,
            started_at=moment(session),
        )
        session.add(row)
        session.flush()
    elif row.model_sha256 != model_sha256:
        raise ConflictError("A request with this boot and sequence began a run of another model.")
    return row.as_view(StartedRun)


def run_of(session: Session, device_id: str, run_id: str) -> StartedRun | None:
    """A run of this device; None if it began no such run."""
    row = session.get(DeviceRun, run_id)
    if row is None or row.device_id != device_id:
        return None
    reported = session.scalar(select(exists().where(DeviceReportRow.run_id == run_id)))
    return row.as_view(StartedRun, reported=bool(reported))


def answered(session: Session, device_id: str, report: DeviceReport) -> ReportAnswer | None:
    """The answer to a report whose identity is known: the first answer, or a conflict; None for a new report."""
    query = select(DeviceReportRow).where(
        DeviceReportRow.device_id == device_id,
        DeviceReportRow.boot_id == report.boot_id,
        DeviceReportRow.sequence == report.sequence,
    )
    row = session.scalars(query).one_or_none()
    if row is None:
        return None
    if row.body_digest != _digest(report):
        identity, state = {"boot_id": report.boot_id, "sequence": report.sequence}, ReportState.CONFLICT
        return ReportAnswer.model_validate({**identity, "report_id": None, "state": state, "ranked": False})
    return _answer(row).model_copy(update={"duplicate": True})


def add_report(session: Session, request: DeviceRequest, judged: JudgedReport) -> ReportAnswer:
    """Stores a new report and returns its answer."""
    report = judged.report
    same = ("boot_id", "sequence", "run_id", "model_sha256", "input_source", "board")
    row = DeviceReportRow(
        **{name: getattr(report, name) for name in (*same, "count", "energy_per_inference_uj")},
        **judged.model_dump(include={"source", "state", "ranked"}),
        id=new_id(),
        device_id=request.device_id,
        received_at=request.received_at,
        runner=report.runner.name,
        reasons=[reason.value for reason in judged.reasons],
        flags=[flag.value for flag in judged.flags],
        latency_p50_us=report.latency_us.p50,
        power_source=report.power.source,
        body_digest=_digest(report),
        document=report.model_dump(mode="json"),
    )
    session.add(row)
    session.flush()
    _enter(session, row)
    return _answer(row)


def list_reports(
    session: Session, device_id: str, *, limit: int = 50, cursor: str | None = None
) -> DeviceReportPage:
    """A page of a device's reports, newest first. Raises CursorError."""
    query = select(DeviceReportRow).where(DeviceReportRow.device_id == device_id)
    rows, following = newest_first(session, query, DeviceReportRow.id, limit, cursor)
    return DeviceReportPage(
        reports=tuple(row.as_view(DeviceReportView) for row in rows), next_cursor=following
    )


def _digest(report: DeviceReport) -> str:
    return digest(report.model_dump(mode="json"))


def _answer(row: DeviceReportRow) -> ReportAnswer:
    """With the reasons and flags that this version knows."""
    reasons = [name for name in row.reasons if name in set(Reason)]
    return row.as_view(
        ReportAnswer,
        report_id=row.id,
        reasons=reasons,
        flags=[name for name in row.flags if name in set(Flag)],
    )


def _enter(session: Session, report: DeviceReportRow) -> None:
    """Enters a report that was just stored on the edge leaderboard."""
    place = {
        "model_sha256": report.model_sha256,
        "input_source": report.input_source,
        "runner": report.runner,
        "device_id": report.device_id,
        "ranked": report.ranked,
    }
    standing = session.get(EdgeStanding, place)
    if standing is None:
        session.add(EdgeStanding(**place, report_id=report.id))
    else:
        current = session.get_one(DeviceReportRow, standing.report_id)
        is_new = _setup(report.document) != _setup(current.document)
        if not report.ranked or is_new or _support(report) >= _support(current):
            standing.report_id = report.id
    session.flush()


def _setup(report: Document) -> tuple[object, ...]:
    return report["firmware_sha256"], report["runner"]["version"], report["clock_hz"]


def _support(report: DeviceReportRow) -> tuple[bool, bool, int]:
    """Windows and not inferences are counted: of windows of equal length the fastest has the most inferences."""
    return not report.flags, report.energy_per_inference_uj is not None, len(report.document["windows"])


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


def models_of_reports(session: Session) -> list[str]:
    """The files of models that the service knows or has reports of, sorted."""
    known = session.scalars(select(EdgeModel.sha256)).all()
    return sorted({*known, *session.scalars(select(EdgeStanding.model_sha256).distinct())})


def boards_of_reports(session: Session) -> list[str]:
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
