"""The directories of OptiGPU's files."""

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

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
