"""Results as they were stored, with their raw samples and the files that meters wrote: see docs/decisions/0006.

And the valid results of one place on the leaderboard over time.
"""

import hashlib
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from mimetypes import MimeTypes
from pathlib import Path
from typing import Any

from sqlalchemy import LargeBinary, Row, Select, func, select
from sqlalchemy.orm import Session, defer

from optigpu.documents.result import Result, Samples
from optigpu.documents.views import (
    ArtifactsView,
    ArtifactView,
    History,
    HistoryPoint,
    RowFacts,
    SamplesView,
    Standing,
    Withdrawn,
)
from optigpu.job.spec import digest
from optigpu.store.database import Database, absent, row_of
from optigpu.store.entries import metric_row
from optigpu.store.statements import before, encode_cursor, insert_into
from optigpu.store.tables import (
    ArtifactRow,
    BoardRow,
    EnvironmentRow,
    LeaderboardEntry,
    MetricRow,
    ResultRow,
    SamplesRow,
    VariantRow,
)
from optigpu.vocabulary import METRICS, ConflictError, NotFoundError


def get(session: Session, result_id: str) -> dict[str, Any]:
    """The result's document as it was stored, not validated again. Raises NotFoundError."""
    found = _documents(session, _with_environment().where(ResultRow.id == result_id))
    if not found:
        raise absent(session, Withdrawn.RESULT, result_id)
    return found[0]


def by_id(session: Session, result_ids: Collection[str]) -> dict[str, dict[str, Any]]:
    """The documents of those of these results that are there."""
    if not result_ids:
        return {}
    found = _documents(session, _with_environment().where(ResultRow.id.in_(result_ids)))
    return {document["id"]: document for document in found}


def of_job(session: Session, job_id: str) -> list[dict[str, Any]]:
    """The results of a job's variants, in the order of the plan."""
    query = _with_environment().join(VariantRow, VariantRow.result_id == ResultRow.id)
    return _documents(session, query.where(VariantRow.job_id == job_id).order_by(VariantRow.index))


def of_workload(session: Session, workload: str, model: str | None) -> list[dict[str, Any]]:
    """The valid results of a kind of workload with a model, the newest first, with whatever shapes and stack."""
    query = _with_environment().join(LeaderboardEntry, LeaderboardEntry.result_id == ResultRow.id)
    asked = (LeaderboardEntry.workload == workload, LeaderboardEntry.model == model)
    valid = LeaderboardEntry.standing != Standing.INVALID
    return _documents(session, query.where(*asked, valid).order_by(LeaderboardEntry.measured_at.desc()))


def samples(session: Session, result_id: str) -> SamplesView:
    """The raw samples of a result, bit for bit. Raises NotFoundError."""
    row_of(session, ResultRow, Withdrawn.RESULT, result_id)
    query = select(SamplesRow).where(SamplesRow.result_id == result_id).order_by(SamplesRow.name)
    found = {row.name: unpack(row.lengths, row.data) for row in session.scalars(query)}
    return SamplesView(result_id=result_id, samples=found)


def sample_names(session: Session, result_id: str) -> tuple[str, ...]:
    """The metrics of which a result has raw samples, in order. Raises NotFoundError."""
    row_of(session, ResultRow, Withdrawn.RESULT, result_id)
    query = select(SamplesRow.name).where(SamplesRow.result_id == result_id).order_by(SamplesRow.name)
    return tuple(session.scalars(query))


def packed_samples(session: Session, result_id: str, name: str) -> tuple[list[int], bytes]:
    """The samples of one metric as `pack` made them."""
    query = select(SamplesRow.lengths, SamplesRow.data)
    found = session.execute(query.where(SamplesRow.result_id == result_id, SamplesRow.name == name)).one()
    return found.lengths, found.data


def add(session: Session, result: Result, samples: Mapping[str, Samples]) -> None:
    """Stores a result with its metrics, samples, and its environment unless that is known. Raises ConflictError for a
    known id."""
    if session.get(ResultRow, result.id) is not None:
        raise ConflictError(f"There is a result {result.id} already; each result has an id of its own.")
    document = result.model_dump(mode="json")
    environment = document["environment"]
    known = digest(environment)
    session.execute(
        insert_into(session, EnvironmentRow)
        .values(digest=known, document=environment)
        .on_conflict_do_nothing(index_elements=["digest"])
    )
    session.add(
        ResultRow(
            id=result.id,
            job_id=result.job_id,
            created_at=result.created_at,
            environment_digest=known,
            document=document | {"environment": None},
        )
    )
    session.flush()  # the rows that follow refer to it
    known_figures = [each for each in result.metrics.items() if each[1].value is not None]
    session.add_all(metric_row(result, name, metric) for name, metric in known_figures)
    for name, values in samples.items():
        lengths, data = pack(values)
        session.add(SamplesRow(result_id=result.id, name=name, lengths=lengths, data=data))
    session.flush()


def pack(samples: Samples) -> tuple[list[int], bytes]:
    """The number of samples in each replicate, and all of them as compressed little-endian doubles."""
    import numpy as np  # here, because the API lists results all day and unpacks samples seldom

    flat = np.array([value for replicate in samples for value in replicate], dtype="<f8")
    return [len(replicate) for replicate in samples], zlib.compress(flat.tobytes())


def unpack(lengths: list[int], data: bytes) -> Samples:
    """The inverse of `pack`."""
    import numpy as np

    flat = np.frombuffer(zlib.decompress(data), dtype="<f8")
    ends = np.cumsum(lengths, dtype=int)
    return tuple(tuple(flat[end - length : end].tolist()) for length, end in zip(lengths, ends, strict=True))


def _with_environment() -> Select[ResultRow, EnvironmentRow]:
    return select(ResultRow, EnvironmentRow).join(
        EnvironmentRow, EnvironmentRow.digest == ResultRow.environment_digest
    )


def _documents(session: Session, query: Select[ResultRow, EnvironmentRow]) -> list[dict[str, Any]]:
    found = session.execute(query)
    return [row.document | {"environment": environment.document} for row, environment in found]


MOST_POINTS = 1000


def history_of(
    session: Session,
    result_id: str,
    *,
    metric: str | None = None,
    limit: int = MOST_POINTS,
    cursor: str | None = None,
) -> History:
    """The newest results of this one's place, without changes of their level, by its workload's primary metric if none
    is given. Raises NotFoundError, for an unknown metric too, and CursorError."""
    entry = row_of(session, LeaderboardEntry, Withdrawn.RESULT, result_id)
    name = metric or session.get_one(BoardRow, entry.board).primary_metric
    if name not in METRICS:
        raise NotFoundError(f"There is no metric {name!r}; the metrics are {', '.join(METRICS)}.")
    found = _found(session, entry, name, limit + 1, cursor)
    points = tuple(_point(row) for row in reversed(found[:limit]))
    facts = RowFacts.model_validate(entry.shown)
    oldest = points[0] if len(found) > limit else None
    return History(
        **facts.model_dump(include={"workload", "model", "label", "backend", "device", "hardware"}),
        metric=name,
        unit=METRICS[name].unit,
        better=METRICS[name].better,
        points=points,
        next_cursor=encode_cursor(oldest.measured_at.isoformat(), oldest.result_id) if oldest else None,
    )


def _found(
    session: Session, entry: LeaderboardEntry, metric: str, limit: int, cursor: str | None
) -> Sequence[Row[*tuple[Any, ...]]]:
    """The newest ones first."""
    each = LeaderboardEntry
    query = (
        select(
            *(each.result_id, each.measured_at, each.standing, each.replicates, each.warnings, each.shown),
            *(MetricRow.value, MetricRow.low, MetricRow.high),
        )
        .join(MetricRow, (MetricRow.result_id == each.result_id) & (MetricRow.name == metric))
        .where(
            each.board == entry.board,
            each.variant_digest == entry.variant_digest,
            each.hardware_class == entry.hardware_class,
            each.standing != Standing.INVALID,
        )
        .order_by(each.measured_at.desc(), each.result_id.desc())
        .limit(limit)
    )
    if cursor is not None:
        query = query.where(before(cursor, each.measured_at, each.result_id))
    found: Sequence[Row[*tuple[Any, ...]]] = session.execute(query).all()
    return found


def _point(row: Row[*tuple[Any, ...]]) -> HistoryPoint:
    return HistoryPoint(
        result_id=row.result_id,
        measured_at=row.measured_at,
        standing=row.standing,
        value=row.value,
        ci=None if row.low is None else (row.low, row.high),
        replicates=row.replicates,
        versions=RowFacts.model_validate(row.shown).versions,
        warnings=tuple(row.warnings.split()),
    )


MOST_ARTIFACT_BYTES = 32 * 2**20
"""The largest compressed size of one stored file."""

PIECE_BYTES = 2**20
LONGEST_NAME = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_TYPES = MimeTypes()  # the built-in ones alone: what the machine's files add would differ between machines


@dataclass(frozen=True)
class Artifact:
    """A file as it is stored: compressed `data`, or the `reason` why there is none."""

    name: str
    media_type: str
    size_bytes: int | None = None
    sha256: str | None = None
    reason: str | None = None
    data: bytes | None = None


def read_artifacts(files: Mapping[str, Path]) -> tuple[Artifact, ...]:
    """Reads and compresses files. One that cannot be kept becomes a reason, never an error. A name keeps letters,
    digits, dots (but none in front), dashes and underscores; each other character becomes an underscore."""
    return tuple(starmap(_read, {_safe(name): path for name, path in files.items()}.items()))


def received_artifact(artifact: Artifact) -> Artifact:
    """A file that came over HTTP, if it is what it says: its bytes when unpacked are of that size and hash."""
    name, kind = _safe(artifact.name), _media_type(artifact.name)
    if artifact.data is None:
        return Artifact(name, kind, artifact.size_bytes, reason=artifact.reason or "It was not sent.")
    if len(artifact.data) > MOST_ARTIFACT_BYTES or not _is_whole(artifact):
        return Artifact(name, kind, reason="What came is not the file that was announced.")
    return Artifact(name, kind, artifact.size_bytes, artifact.sha256, data=artifact.data)


def _is_whole(artifact: Artifact) -> bool:
    """Unpacks no more than the announced size, a piece at a time."""
    assert artifact.data is not None
    decompressor, digest, size = zlib.decompressobj(), hashlib.sha256(), 0
    packed = artifact.data
    try:
        while size <= (artifact.size_bytes or 0) and (plain := decompressor.decompress(packed, PIECE_BYTES)):
            digest.update(plain)
            size, packed = size + len(plain), decompressor.unconsumed_tail
    except zlib.error:
        return False
    return size == artifact.size_bytes and digest.hexdigest() == artifact.sha256


def add_artifact(session: Session, result_id: str, artifacts: Iterable[Artifact]) -> None:
    """Stores the files of a result that was just added."""
    session.add_all(ArtifactRow(result_id=result_id, **vars(artifact)) for artifact in artifacts)
    session.flush()


def list_artifacts(session: Session, result_id: str) -> ArtifactsView:
    """The files of a result, by name. Raises NotFoundError when there is no such result."""
    row_of(session, ResultRow, Withdrawn.RESULT, result_id)
    query = select(ArtifactRow).options(defer(ArtifactRow.data)).where(ArtifactRow.result_id == result_id)
    rows = session.scalars(query.order_by(ArtifactRow.name))
    return ArtifactsView(result_id=result_id, artifacts=tuple(row.as_view(ArtifactView) for row in rows))


def find_artifact(session: Session, result_id: str, name: str) -> ArtifactView:
    """One file of a result that was kept. Raises NotFoundError, with the reason where it was not."""
    found = {artifact.name: artifact for artifact in list_artifacts(session, result_id).artifacts}.get(name)
    if found is None:
        raise NotFoundError(
            f"Result {result_id} has no file {name}; its list of artifacts names those that it has."
        )
    if found.reason is not None:
        raise NotFoundError(f"The file {name} was not kept: {found.reason}")
    return found


def artifact_content(database: Database, result_id: str, name: str) -> Iterator[bytes]:
    """The file in pieces of at most PIECE_BYTES, each read in its own session: a slow reader holds none."""
    decompressor = zlib.decompressobj()
    start = 1
    stored = ArtifactRow.result_id == result_id, ArtifactRow.name == name
    while True:
        piece = func.substr(ArtifactRow.data, start, PIECE_BYTES, type_=LargeBinary)
        with database.read() as session:
            packed: bytes | None = session.execute(select(piece).where(*stored)).scalar_one()
        if not packed:
            return
        start += len(packed)
        while packed:
            if plain := decompressor.decompress(packed, PIECE_BYTES):
                yield plain
            packed = decompressor.unconsumed_tail


def _read(name: str, path: Path) -> Artifact:
    kind = _media_type(name)
    compressor, digest, packed = zlib.compressobj(), hashlib.sha256(), bytearray()
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            while len(packed) <= MOST_ARTIFACT_BYTES and (plain := file.read(PIECE_BYTES)):
                digest.update(plain)
                packed += compressor.compress(plain)
    except OSError as error:
        return Artifact(name, kind, reason=f"It could not be read: {error.strerror}.")
    packed += compressor.flush()
    if len(packed) > MOST_ARTIFACT_BYTES:
        why = f"It is larger than {MOST_ARTIFACT_BYTES} bytes even when compressed."
        return Artifact(name, kind, size, reason=why)
    return Artifact(name, kind, size, digest.hexdigest(), data=bytes(packed))


def _media_type(name: str) -> str:
    media_type, encoding = _TYPES.guess_type(name)
    return f"application/{encoding}" if encoding else media_type or "application/octet-stream"


def _safe(name: str) -> str:
    return _UNSAFE.sub("_", name).lstrip(".")[:LONGEST_NAME] or "file"
