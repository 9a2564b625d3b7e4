"""A folder of what can be made again, files or folders: bounded, and written by one process at a time.

    folder = BoundedFolder(cache_dir() / "gguf", ".gguf", bound.most_bytes())
    with folder.locked(), folder.draft_of(path) as draft:
        ...  # write the draft
        folder.admit(draft)

A file is written under another name and renamed when it is whole, so that half a file is never read.
"""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock  # a dependency of torch

from optigpu.vocabulary import UnsupportedError

_UNFINISHED = ".unfinished"
_LEFT_BY_THE_KILLED = (f"*{_UNFINISHED}", ".tmp*")
"""Unfinished files, under our name for them and under that of safetensors."""


@dataclass(frozen=True)
class Bound:
    """How much a folder may hold: what the environment says, or else the default."""

    variable: str
    """The environment variable, in GiB; 0 keeps nothing."""
    default: int
    """In bytes."""
    files: str
    """What is kept, as the error names it."""

    def most_bytes(self) -> int:
        """Raises UnsupportedError when the environment's bound is not a number from 0 on."""
        text = os.environ.get(self.variable)
        if not text:
            return self.default
        try:
            gib = float(text)
        except ValueError:
            gib = math.nan
        if not 0 <= gib < math.inf:
            raise UnsupportedError(
                f"{self.variable} must be a number of GiB, 0 or more, not {text!r}; 0 keeps no {self.files}."
            )
        return int(gib * 2**30)


@dataclass(frozen=True)
class BoundedFolder:
    """The least recently used make room for a new one. Only who holds the lock writes or removes."""

    path: Path
    """It may not exist yet."""
    suffix: str
    """Of what is kept: files, or folders with files of their own."""
    most: float
    """Bytes; infinite for a folder without a bound."""

    @contextmanager
    def locked(self, timeout_s: float = -1) -> Iterator[None]:
        """Makes the folder, waits for its lock, and removes what a process that was killed left unfinished.

        Raises OSError when the folder cannot be made or others hold the lock for longer than the timeout, and
        NotImplementedError on a file system without locks.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(self.path / f"{self.path.name}.lock", timeout=timeout_s):
            for pattern in _LEFT_BY_THE_KILLED:
                for left in self.path.glob(pattern):
                    remove(left)
            yield

    @contextmanager
    def draft_of(self, path: Path) -> Iterator[Path]:
        """The name under which to write `path`; what has not been admitted by the end is removed."""
        draft = path.with_suffix(_UNFINISHED)
        try:
            yield draft
        finally:
            remove(draft)

    def admit(self, draft: Path) -> None:
        """Gives a whole file its name, in place of an earlier one, once others have made room for it. A file that is
        larger than the bound is admitted too, as the only one."""
        path = draft.with_suffix(self.suffix)
        self._make_room(path, self.most - bytes_of(draft))
        if path.is_dir():
            remove(path)  # a folder cannot be replaced while it holds something
        draft.replace(path)

    def _make_room(self, path: Path, room: float) -> None:
        """Removes the least recently used until others than `path` take at most `room` bytes."""
        others = {other: bytes_of(other) for other in self.path.glob(f"*{self.suffix}") if other != path}
        total = sum(others.values())
        for other in sorted(others, key=lambda each: each.stat().st_mtime_ns):
            if total <= room:
                return
            remove(other)
            total -= others[other]


def bytes_of(path: Path) -> int:
    """The bytes of a file, or of all files below a folder."""
    if not path.is_dir():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def remove(path: Path) -> None:
    """A file, or a folder with all that is in it; nothing where neither is."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def mark_used(path: Path) -> None:
    """Makes a file the most recently used; who may only read it uses it all the same."""
    with suppress(OSError):
        os.utime(path)
