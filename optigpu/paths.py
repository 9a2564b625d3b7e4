"""The directories of OptiGPU's files, and a folder of what can be made again, files or folders: bounded, and written by
one process at a time.

    folder = BoundedFolder(cache_dir() / "gguf", ".gguf", bound.most_bytes())
    with folder.locked(), folder.draft_of(path) as draft:
        ...  # write the draft
        folder.admit(draft)

A file is written under another name and renamed when it is whole, so that half a file is never read.
"""

import hashlib
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock  # a dependency of torch

from optigpu.vocabulary import OptiGPUError, UnsupportedError

DATA_DIR, LOCK_DIR = "OPTIGPU_DATA_DIR", "OPTIGPU_LOCK_DIR"
"""The environment variables of the data folder and of the folder of locks."""
_PLAIN = re.compile(r"[A-Za-z0-9/._+@%=,~-]*")
"""A path that means the same on every command line."""
_ENDS = r"\s:;,=\"'"
"""What stands between the paths of a text."""


@contextmanager
def saying(problem: str, advice: str) -> Iterator[None]:
    """An OSError within is an OptiGPUError: the problem, what the system says of it, and what to do."""
    try:
        yield
    except OSError as error:
        raise OptiGPUError(f"{problem} ({error.strerror}); {advice}.") from error


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """What to write in place of a file, whose name it gets at the end: whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def data_dir() -> Path:
    """OPTIGPU_DATA_DIR, else $XDG_DATA_HOME/optigpu, else ~/.local/share/optigpu. It may not exist yet. Raises
    UnsupportedError where there is neither a variable nor a home folder that can hold it, and for a name that no folder
    can have."""
    chosen = os.environ.get(DATA_DIR)
    if chosen:
        return _folder(chosen, DATA_DIR)
    shared = os.environ.get("XDG_DATA_HOME")
    if shared:
        return _folder(shared, "XDG_DATA_HOME") / "optigpu"
    home = _usable_home(".local/share/optigpu")
    if home is None:
        raise UnsupportedError(
            f"This user has no home folder that can be written; set {DATA_DIR} to a folder for OptiGPU's files."
        )
    return home / ".local" / "share" / "optigpu"


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/optigpu, else ~/.cache/optigpu: files that can be created again. It may not exist yet. Raises
    UnsupportedError where there is neither a home folder nor a data folder."""
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else home_dir() / ".cache") / "optigpu"


def operators_dir() -> Path:
    """Where C++ operators are kept once they are compiled. It may not exist yet. Raises what `cache_dir` raises."""
    return cache_dir() / "ops"


def home_dir() -> Path:
    """The user's home folder; `home` in the data folder for a user who has none, or may keep no files there.

    A container's user id often has no name and no home folder, or HOME=/. Raises UnsupportedError where there is
    neither.
    """
    return _usable_home(".cache/optigpu") or data_dir() / "home"


def lock_dir() -> Path:
    """OPTIGPU_LOCK_DIR, else `locks` in the data directory: a job that measures on this host locks a file there."""
    chosen = os.environ.get(LOCK_DIR)
    return _folder(chosen, LOCK_DIR) if chosen else data_dir() / "locks"


def plain_path(folder: Path) -> Path:
    """The folder by a path that a compiler's command line can hold: its own, or else that of a link to it.

    torch.compile writes such lines without quotes, so that a space, a quote or a backslash breaks them. A folder that
    is linked is made first. Raises UnsupportedError where no link can be made.
    """
    whole = folder.absolute()
    if _PLAIN.fullmatch(str(whole)):
        return folder
    try:
        whole.mkdir(parents=True, exist_ok=True)
        link = _folder_of_links() / hashlib.sha256(os.fsencode(whole)).hexdigest()[:16]
        with suppress(FileExistsError):
            link.symlink_to(whole)
        return link
    except OSError as error:
        raise UnsupportedError(
            f"Compilers cannot use {str(folder)!r}, and no link to it can be made ({error}); set {DATA_DIR} and "
            "XDG_CACHE_HOME to paths without spaces and quotes."
        ) from None


def expanded(text: str, variable: str) -> Path:
    """The path that an environment variable holds, in which ~ is a home folder. Raises UnsupportedError for none."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise UnsupportedError(
            f"{variable} is {text!r}, and there is no such home folder; write the whole path."
        ) from None


def _folder(text: str, variable: str) -> Path:
    """The folder that an environment variable names, which may not exist yet. Raises UnsupportedError for none."""
    path = expanded(text, variable)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path
    except OSError as error:
        why = f"which cannot be a folder ({error.strerror})"
    else:
        if is_folder:
            return path
        why = "which is a file"
    raise UnsupportedError(f"{variable} is {text!r}, {why}; name a folder.")


def without_home(text: str) -> str:
    """The text with ~ in the place of the home folder, where a path in it begins so. Other folders keep their names."""
    home = _home()
    if home is None or not home.is_absolute() or home == Path(home.anchor):
        return text
    return _home_in_text(home.parts[1:]).sub(r"\g<before>~", text)


def _home() -> Path | None:
    """None for a user id that has no home folder, while HOME is not set."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def _usable_home(folder: str) -> Path | None:
    """The home folder, if it has this folder or this user may make it there."""
    home = _home()
    if home is None:
        return None
    there = next(each for each in (home / folder, *(home / folder).parents) if os.path.exists(each))
    can_be = os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
    return home if there == home / folder or can_be else None


def _folder_of_links() -> Path:
    """A folder of this user's alone: in one that others may write, they could have made it before, or the links."""
    roots = filter(_PLAIN.fullmatch, (tempfile.gettempdir(), "/tmp", "/var/tmp"))
    folder = Path(next(roots)) / f"optigpu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"others may write {folder}; remove it")
    return folder


@cache
def _home_in_text(parts: tuple[str, ...]) -> re.Pattern[str]:
    """A path begins after a flag such as -I, and goes on behind the home folder's last name or ends there."""
    home = "".join(f"/+{re.escape(part)}" for part in parts)
    return re.compile(rf"(?<![^{_ENDS}])(?P<before>[^/{_ENDS}]*){home}(?![^/{_ENDS}])")


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
