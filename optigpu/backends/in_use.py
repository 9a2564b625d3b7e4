"""Which kept models a measuring process reads: one whose engine crashes is not read by the next process again.

An engine that aborts says nothing of its file. So the process notes what it reads in the job's folder, and the
conductor removes what a process noted that crashed before it was ready. Loads no torch.
"""

import os
from contextlib import suppress
from pathlib import Path, PurePath

from optigpu.bounded_folder import remove
from optigpu.paths import cache_dir


def converted_dir() -> Path:
    """The folder of converted models, with a folder for each engine."""
    return cache_dir() / "converted"


def note_use(job_folder: Path, kept: Path) -> None:
    """Notes that this process reads a model of `converted_dir()` that an earlier one wrote."""
    with suppress(OSError), _note(job_folder, os.getpid()).open("a", encoding="utf-8") as file:
        file.write(f"{kept.parent.name}/{kept.name}\n")


def remove_used(job_folder: Path, pid: int) -> tuple[str, ...]:
    """Removes what the process `pid` noted, and returns the names of what was removed."""
    try:
        lines = _note(job_folder, pid).read_text("utf-8").splitlines()
    except (OSError, ValueError):  # it noted nothing, or a model's code wrote something else there
        return ()
    return tuple(PurePath(line).name for line in dict.fromkeys(lines) if _is_removed(line))


def _note(job_folder: Path, pid: int) -> Path:
    return job_folder / f"reading-{pid}"


def _is_removed(line: str) -> bool:
    """A model's code can write the note too: nothing outside of the folder of converted models is removed."""
    parts = PurePath(line).parts
    if len(parts) != 2 or {"..", "/"} & set(parts):
        return False
    path = converted_dir() / parts[0] / parts[1]
    was_there = path.exists()
    with suppress(OSError):
        remove(path)
    return was_there and not path.exists()
