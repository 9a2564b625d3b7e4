"""A folder of files that can be made again: bounded, and written by one process at a time.

    folder = BoundedFolder(cache_dir() / "gguf", ".gguf", bound.most_bytes())
    with folder.locked(), folder.draft_of(path) as draft:
        ...  # write the draft
        folder.admit(draft)

A file is written under another name and renamed when it is whole, so that half a file is never read.
"""

import math
import os
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
    """The least recently used files make room for a new one. Only who holds the lock writes or removes files."""

    path: Path
    """It may not exist yet."""
    suffix: str
    """Of the files that are kept."""
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
                    left.unlink(missing_ok=True)
            yield

    @contextmanager
    def draft_of(self, path: Path) -> Iterator[Path]:
        """The name under which to write `path`; what has not been admitted by the end is removed."""
        draft = path.with_suffix(_UNFINISHED)
        try:
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def admit(self, draft: Path) -> None:
        """Gives a whole file its name, in place of an earlier one, once others have made room for it.

        A file that is larger than the bound is admitted too, as the only one.
        """
        path = draft.with_suffix(self.suffix)
        self._make_room(path, self.most - draft.stat().st_size)
        draft.replace(path)

    def _make_room(self, path: Path, room: float) -> None:
        """Removes the least recently used until others than `path` take at most `room` bytes."""
        others = [(other, other.stat()) for other in self.path.glob(f"*{self.suffix}") if other != path]
        size = sum(status.st_size for _, status in others)
        for other, status in sorted(others, key=lambda item: item[1].st_mtime_ns):
            if size <= room:
                return
            other.unlink(missing_ok=True)
            size -= status.st_size


def mark_used(path: Path) -> None:
    """Makes a file the most recently used; who may only read it uses it all the same."""
    with suppress(OSError):
        os.utime(path)
