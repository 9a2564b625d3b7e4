"""The compiled kernels of Triton and Inductor, carried from one run to the next in few small files."""

import gzip
import io
import tarfile
from pathlib import Path

PARTS, PART_BYTES, SLACK = 6, 14 * 2**20, 2**20
"""The most files and their size; what the compressor may hold back."""


def unpack(source: Path, folder: Path) -> None:
    """Puts what `pack` wrote back into the folder."""
    if packed := b"".join(part.read_bytes() for part in sorted(source.glob("caches.*"))):
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            archive.extractall(folder, filter="data")


def pack(folder: Path, names: tuple[str, ...], target: Path) -> None:
    """The files of these folders inside `folder`, the newest first, as far as they fit."""
    found = [path for name in names for path in (folder / name).rglob("*") if path.is_file()]
    packed = io.BytesIO()
    with gzip.open(packed, "wb", 1) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for path in sorted(found, key=lambda each: each.stat().st_mtime, reverse=True):
            if packed.tell() + path.stat().st_size + SLACK <= PARTS * PART_BYTES:
                archive.add(path, path.relative_to(folder))
    target.mkdir(parents=True, exist_ok=True)
    for part in target.glob("caches.*"):
        part.unlink()
    for number, start in enumerate(range(0, packed.tell(), PART_BYTES)):
        (target / f"caches.{number}").write_bytes(packed.getbuffer()[start : start + PART_BYTES])
