"""Models in an engine's own format, written once from a reference and kept: a large one takes minutes.

A converter is a process of its own, so that the measuring process loads no torch for it and holds no second copy of the
model. The arguments of its command line and its exit statuses stand here too.
"""

import argparse
import errno
import hashlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePath

from optigpu.backends.base import Order
from optigpu.backends.engine import allocation_failed
from optigpu.documents.facts import WeightFacts
from optigpu.models import families
from optigpu.models.described import configuration_file
from optigpu.models.held import gguf_file, origin_of, sound_directory
from optigpu.models.reference import BUNDLED
from optigpu.paths import Bound, BoundedFolder, cache_dir, mark_used, remove
from optigpu.programs import run_program
from optigpu.vocabulary import OptiGPUError, UnsupportedError, canonical_json, first_line

REFUSED = 3
"""The exit status of a converter when this model cannot be written; the last line of its stdout says why."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def model_arguments(order: Order) -> tuple[str, ...]:
    """Which model a converter is to load, for a parser of `converter_parser`."""
    return ("--model", str(order.model), "--seed", str(order.seed), "--threads", str(order.threads))


def converter_parser(
    program: str, description: str | None, writes: str, *, needs_model: bool = True
) -> argparse.ArgumentParser:
    """The arguments that converters share. `program` is a module, and `writes` says what --output names."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--output", type=Path, required=True, help=f"the {writes} to write")
    parser.add_argument("--model", required=needs_model, help="a model reference")
    parser.add_argument("--seed", type=int, default=0, help="of a preset's random weights")
    parser.add_argument("--threads", type=int, default=1, help="how many CPU threads it may use")
    return parser


def written(write: Callable[[], None], output: Path) -> int:
    """The exit status of a converter's program that calls `write` to make `output`.

    REFUSED for an UnsupportedError, with its text on stdout; 1 for a full disk, with a sentence on stderr. Libraries
    have errors of their own for one, so whatever was raised, it is looked at what was written so far; before one that
    removes that, `require_space` is asked.
    """
    try:
        write()
    except Exception as error:
        full = error if isinstance(error, OSError) and error.errno in _FULL else _no_space(output)
        if full is not None:
            where = f"{output.parent} ({full.strerror})"
            advice = "free some, or name another folder in XDG_CACHE_HOME."
            print(f"there is no space for it in {where}; {advice}", file=sys.stderr)
            return 1
        if isinstance(error, UnsupportedError):
            print(error)
            return REFUSED
        raise
    return 0


def require_space(folder: Path, size: int) -> None:
    """Raises OSError where the disk has no space for a file of `size` bytes in a folder."""
    if sys.platform == "darwin":  # which reserves nothing
        if shutil.disk_usage(folder).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)


def _no_space(output: Path) -> OSError | None:
    """The disk's error where the largest file of what a failed converter wrote cannot grow, or None. The file grows."""
    files = [path for path in (output, *output.rglob("*")) if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None:
        return None
    try:
        with largest.open("ab") as file:
            file.write(bytes(2**20))
    except OSError as error:
        return error if error.errno in _FULL else None
    return None


BOUND = Bound("OPTIGPU_CONVERTED_CACHE_GB", default=40 * 2**30, files="converted models")
"""Of each engine. With a bound of 0 a converted model lives as long as its job."""
_LOADING = Path(families.__file__).parent / "loading"
_COMMON = (Path(families.__file__), _LOADING / "load.py", _LOADING / "expressed.py")


@dataclass(frozen=True)
class Converter:
    """What writes the models of one engine.

    `program` is a module that runs as a process of its own, so that the measuring process loads no torch for it. It is
    called with `--output PATH`, a file or a folder that it writes, then with the arguments of `made`. `sources` are the
    files whose text decides what is written, and `libraries` the packages whose versions do.
    """

    engine: str
    program: str
    suffix: str
    sources: tuple[Path, ...]
    libraries: tuple[str, ...]

    def made(
        self,
        order: Order,
        form: str,
        arguments: Sequence[str],
        progress: Callable[[str], None],
        doing: str = "converting the model",
    ) -> Path:
        """The model of an order in one `form`, such as "int4-128"; written if it is not there.

        It is written into the job's folder where nothing is kept. `doing` says what takes so long. Raises
        UnsupportedError for a model that cannot be written, OptiGPUError when writing fails.
        """
        folder, target = self._place(order, form)
        if target.exists():
            if target.is_relative_to(converted_dir()):
                note_use(order.folder, target)
        else:
            try:
                with folder.locked():
                    if not target.exists():  # who held the lock before may have written it
                        progress(doing)
                        self._write(folder, target, arguments)
            except (OSError, NotImplementedError) as error:  # the second for a file system without locks
                why = getattr(error, "strerror", None) or str(error)
                raise OptiGPUError(
                    f"Converted models cannot be kept in {folder.path} ({why}); give the right to write there, name "
                    f"another folder in XDG_CACHE_HOME, or set {BOUND.variable}=0 to keep none."
                ) from error
        mark_used(target)
        return target

    def kept(self, order: Order, form: str) -> Path | None:
        """What `made` wrote before, or None."""
        _, path = self._place(order, form)
        return path if path.exists() else None

    def _place(self, order: Order, form: str) -> tuple[BoundedFolder, Path]:
        """The folder and the path in it, whose name changes with whatever the content depends on."""
        most, reference, origin = BOUND.most_bytes(), order.reference, weights_of(order)
        parent, most_kept = (converted_dir(), most) if most else (order.folder / "converted", math.inf)
        folder = BoundedFolder(parent / self.engine, self.suffix, most_kept)
        if origin.hash is None:
            raise UnsupportedError(origin.reasons["hash"])
        # A configuration may change beside the same weights.
        has_file = reference.kind in ("path", "hub") and gguf_file(reference) is None
        configuration = configuration_file(reference).read_text("utf-8") if has_file else ""
        versions = [version(name) for name in self.libraries]
        found = hashlib.sha256(canonical_json([origin.hash, configuration, versions]).encode())
        for path in (*self.sources, *_COMMON):
            found.update(path.read_bytes())
        name = f"{reference.kind}-{reference.name.replace('/', '_')}-{found.hexdigest()[:16]}"
        return folder, folder.path / f"{name}-{form}{self.suffix}"

    def _write(self, folder: BoundedFolder, target: Path, arguments: Sequence[str]) -> None:
        with folder.draft_of(target) as draft:
            done = run_program(self.program, ("--output", str(draft), *arguments))
            if done.status == REFUSED:
                raise UnsupportedError(_last_line(done.out))
            if done.status:
                why = _last_line(done.err) or f"status {done.status}"
                raise OptiGPUError(f"The model could not be converted for {self.engine}: {why}")
            folder.admit(draft)


def weights_of(order: Order) -> WeightFacts:
    """Where the weights of an order's model come from: their hash is the same for every backend.

    Of the hub's models only what its local cache holds is known.
    """
    reference, directory = order.reference, None
    if reference.kind == "bundled":
        directory = str(BUNDLED[reference.name])
    elif reference.kind == "path" and gguf_file(reference) is None:
        directory = str(sound_directory(reference))
    return origin_of(reference, directory, order.seed, order.folder)


@contextmanager
def whole(path: Path, engine: str) -> Iterator[None]:
    """Reading a kept model: one that cannot be read is damaged and is removed, so that the next process writes it anew.

    Raises OptiGPUError in the place of the RuntimeError, ValueError or OSError of who reads it; an error of an
    allocation says nothing of the file, and stays as it is.
    """
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        if allocation_failed(error):
            raise
        with suppress(OSError):
            remove(path)
        raise OptiGPUError(
            f"{engine} cannot load {path.name}: {first_line(error)}. The file was damaged and has been removed; run "
            "the job again."
        ) from error


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def converted_dir() -> Path:
    """The folder of converted models, with a folder for each engine."""
    return cache_dir() / "converted"


def note_use(job_folder: Path, kept: Path) -> None:
    """Notes that this process reads a model of `converted_dir()` that an earlier one wrote."""
    with suppress(OSError), (job_folder / f"reading-{os.getpid()}").open("a", encoding="utf-8") as file:
        file.write(f"{kept.parent.name}/{kept.name}\n")


def remove_used(job_folder: Path, pid: int) -> tuple[str, ...]:
    """Removes what the process `pid` noted, and returns the names of what was removed."""
    try:
        lines = (job_folder / f"reading-{pid}").read_text("utf-8").splitlines()
    except (OSError, ValueError):  # it noted nothing, or a model's code wrote something else there
        return ()
    removed = []
    for line in dict.fromkeys(lines):
        parts = PurePath(line).parts
        if len(parts) != 2 or {"..", "/"} & set(parts):  # a model's code can write the note too
            continue
        path = converted_dir().joinpath(*parts)
        was_there = path.exists()
        with suppress(OSError):
            remove(path)
        if was_there and not path.exists():
            removed.append(path.name)
    return tuple(removed)
