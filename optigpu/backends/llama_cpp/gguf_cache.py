"""GGUF files of this project's models, written once and kept: a large one takes minutes.

They lie in `gguf` of the cache folder; a file's name changes with the weights, the writer and the libraries' versions.
The least recently used are removed when the folder holds more than the bound.
"""

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from optigpu.backends.llama_cpp import convert
from optigpu.backends.llama_cpp.file_types import FileType
from optigpu.models import facts, families
from optigpu.models.bundled import BUNDLED
from optigpu.models.reference import ModelReference, preset_of
from optigpu.paths import cache_dir
from optigpu.vocabulary import OptiGPUError, UnsupportedError, canonical_json

MOST_GIB = "OPTIGPU_GGUF_CACHE_GB"
"""The environment variable for another bound, in GiB; 0 keeps no file longer than its job."""
MOST_BYTES = 40 * 2**30
KEPT, UNFINISHED = ".gguf", ".unfinished"
_WRITERS = ("convert", "file_types", "gguf_families", "gguf_file", "gguf_tensors")
_SOURCES = (
    *(Path(__file__).with_name(f"{name}.py") for name in _WRITERS),
    Path(families.__file__),
    Path(facts.__file__),
)
_LIBRARIES = ("torch", "transformers", "gguf", "llama-cpp-python")


def gguf_of(
    reference: ModelReference,
    file_type: FileType,
    seed: int,
    threads: int,
    job_folder: Path,
    progress: Callable[[str], None],
) -> Path:
    """The GGUF file of a model; written if it is not there, into `job_folder` where nothing is kept.

    A preset's random weights are drawn from `seed`. Raises UnsupportedError for a model that cannot be written or
    quantized, OptiGPUError when writing fails.
    """
    from filelock import FileLock  # torch depends on it, and so is there

    most = most_bytes()
    folder = (cache_dir() if most else job_folder) / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{reference.kind}-{reference.name}-{_digest(reference, seed)}"
    target = folder / f"{stem}-{file_type.value}{KEPT}"
    if not target.exists():
        with FileLock(folder / "gguf.lock"):
            _clean(folder)
            _make(target, stem, file_type, reference, seed, threads, progress)
            if most:
                _make_room(target, most)
    with suppress(OSError):  # who may only read it uses it all the same
        os.utime(target)
    return target


def most_bytes() -> int:
    """What the folder may hold; 0 where nothing is kept. A file that was just made stays, however large it is.

    Raises UnsupportedError when the environment's bound is no number, or negative.
    """
    text = os.environ.get(MOST_GIB)
    if not text:
        return MOST_BYTES
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not 0 <= gib < math.inf:
        raise UnsupportedError(
            f"{MOST_GIB} must be the number of GiB that GGUF files may take, not {text!r}; 0 keeps none."
        )
    return int(gib * 2**30)


def _make(
    target: Path,
    stem: str,
    file_type: FileType,
    reference: ModelReference,
    seed: int,
    threads: int,
    progress: Callable[[str], None],
) -> None:
    """Writes the file, and before it the F16 file that llama.cpp quantizes; who held the lock before may have."""
    common = ("--threads", str(threads))
    converted = file_type in (FileType.F32, FileType.F16)
    plain = target if converted else target.with_name(f"{stem}-{FileType.F16.value}{KEPT}")
    if not plain.exists():
        progress("writing the GGUF file")
        plain_type = file_type if converted else FileType.F16
        model = ("--model", str(reference), "--seed", str(seed))
        _run(plain, ("--type", plain_type.value, *model, *common))
    if not target.exists():
        progress("quantizing the GGUF file")
        _run(target, ("--type", file_type.value, "--plain", str(plain), *common))


def _run(target: Path, arguments: Sequence[str]) -> None:
    """Runs the converter. The file gets its name when it is whole; only who holds the lock calls this."""
    draft = target.with_suffix(UNFINISHED)
    command = [sys.executable, "-P", "-m", convert.__name__, "--output", str(draft), *arguments]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode == convert.REFUSED:
            raise UnsupportedError(_last_line(done.stdout))
        if done.returncode:
            why = _last_line(done.stderr) or f"status {done.returncode}"
            raise OptiGPUError(f"The GGUF file could not be written: {why}")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _clean(folder: Path) -> None:
    """Removes what a process that was killed left unfinished."""
    for draft in folder.glob(f"*{UNFINISHED}"):
        draft.unlink(missing_ok=True)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def _make_room(kept: Path, most: int) -> None:
    """Removes the least recently used files until the folder holds at most `most` bytes, `kept` left in place."""
    others = [(path, path.stat()) for path in kept.parent.glob(f"*{KEPT}") if path != kept]
    size = kept.stat().st_size + sum(status.st_size for _, status in others)
    for path, status in sorted(others, key=lambda item: item[1].st_mtime_ns):
        if size <= most:
            return
        path.unlink(missing_ok=True)
        size -= status.st_size


def _digest(reference: ModelReference, seed: int) -> str:
    """Changes with whatever the file's content depends on: weights, the writer, and the libraries' versions."""
    preset = preset_of(reference)
    described = {
        "preset": preset and [preset.model_type, preset.config, seed],
        "versions": [version(name) for name in _LIBRARIES],
    }
    found = hashlib.sha256(canonical_json(described).encode())
    weights = () if preset else (BUNDLED[reference.name] / "model.safetensors",)
    for path in (*_SOURCES, *weights):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
