"""Files that meters write (a profiler's trace), stored in the database with the result: see docs/decisions/0006."""

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import starmap
from mimetypes import MimeTypes
from pathlib import Path

from sqlalchemy import LargeBinary, func, select
from sqlalchemy.orm import Session, defer

from optigpu.documents.views import ArtifactsView, ArtifactView, Withdrawn
from optigpu.store.database import Database, row_of
from optigpu.store.tables import ArtifactRow, ResultRow
from optigpu.vocabulary import NotFoundError

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


def read(files: Mapping[str, Path]) -> tuple[Artifact, ...]:
    """Reads and compresses files. One that cannot be kept becomes a reason, never an error. A name keeps letters,
    digits, dots (but none in front), dashes and underscores; each other character becomes an underscore."""
    return tuple(starmap(_read, {_safe(name): path for name, path in files.items()}.items()))


def received(artifact: Artifact) -> Artifact:
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


def add(session: Session, result_id: str, artifacts: Iterable[Artifact]) -> None:
    """Stores the files of a result that was just added."""
    session.add_all(ArtifactRow(result_id=result_id, **vars(artifact)) for artifact in artifacts)
    session.flush()


def list_(session: Session, result_id: str) -> ArtifactsView:
    """The files of a result, by name. Raises NotFoundError when there is no such result."""
    row_of(session, ResultRow, Withdrawn.RESULT, result_id)
    query = select(ArtifactRow).options(defer(ArtifactRow.data)).where(ArtifactRow.result_id == result_id)
    rows = session.scalars(query.order_by(ArtifactRow.name))
    return ArtifactsView(result_id=result_id, artifacts=tuple(row.as_view(ArtifactView) for row in rows))


def find(session: Session, result_id: str, name: str) -> ArtifactView:
    """One file of a result that was kept. Raises NotFoundError, with the reason where it was not."""
    found = {artifact.name: artifact for artifact in list_(session, result_id).artifacts}.get(name)
    if found is None:
        raise NotFoundError(
            f"Result {result_id} has no file {name}; its list of artifacts names those that it has."
        )
    if found.reason is not None:
        raise NotFoundError(f"The file {name} was not kept: {found.reason}")
    return found


def content(database: Database, result_id: str, name: str) -> Iterator[bytes]:
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
