"""The compiled kernels of Triton and Inductor, carried from one quarter of an hour to the next in few small files."""

import gzip
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

PARTS, PART_BYTES = 6, 14 * 2**20
SLACK = 2**20
"""What the compressor may hold back."""


def unpack(source: Path, folder: Path) -> None:
    """Puts what `pack` wrote back into the folder; without such files it stays as it is."""
    packed = b"".join(part.read_bytes() for part in sorted(source.glob("caches.*")))
    if packed:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            archive.extractall(folder, filter="data")


def pack(folder: Path, names: Iterable[str], target: Path) -> None:
    """The files of these folders inside `folder`, the newest first, as far as they fit into the parts."""
    target.mkdir(parents=True, exist_ok=True)
    packed = io.BytesIO()
    found = [path for name in names for path in (folder / name).rglob("*") if path.is_file()]
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True):
            if packed.tell() + path.stat().st_size + SLACK <= PARTS * PART_BYTES:
                archive.add(path, str(path.relative_to(folder)))
    for part in target.glob("caches.*"):
        part.unlink()
    whole = packed.getbuffer()
    for number, start in enumerate(range(0, len(whole), PART_BYTES)):
        (target / f"caches.{number}").write_bytes(whole[start : start + PART_BYTES])
