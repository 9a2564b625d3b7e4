"""GGUF files of this project's models, written once and kept: a large one takes minutes.

They lie in `gguf` of the cache folder; a file's name changes with the weights, the writer and the libraries' versions.
The least recently used are removed when the folder holds more than the bound.
"""

import hashlib
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from optigpu.backends.llama_cpp import convert
from optigpu.backends.llama_cpp.file_types import FileType
from optigpu.bounded_folder import Bound, BoundedFolder, mark_used
from optigpu.models import facts, families
from optigpu.models.bundled import BUNDLED
from optigpu.models.reference import ModelReference, preset_of
from optigpu.paths import cache_dir
from optigpu.vocabulary import OptiGPUError, UnsupportedError, canonical_json

BOUND = Bound("OPTIGPU_GGUF_CACHE_GB", default=40 * 2**30, files="GGUF files")
"""With a bound of 0 a file lives as long as its job."""
SUFFIX = ".gguf"
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
    most = BOUND.most_bytes()
    parent, most_kept = (cache_dir(), most) if most else (job_folder, math.inf)
    folder = BoundedFolder(parent / "gguf", SUFFIX, most_kept)
    stem = f"{reference.kind}-{reference.name}-{_digest(reference, seed)}"
    target = folder.path / f"{stem}-{file_type.value}{SUFFIX}"
    if not target.exists():
        with folder.locked():
            _make(folder, target, stem, file_type, reference, seed, threads, progress)
    mark_used(target)
    return target


def _make(
    folder: BoundedFolder,
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
    plain = target if converted else target.with_name(f"{stem}-{FileType.F16.value}{SUFFIX}")
    if not plain.exists():
        progress("writing the GGUF file")
        plain_type = file_type if converted else FileType.F16
        model = ("--model", str(reference), "--seed", str(seed))
        _run(folder, plain, ("--type", plain_type.value, *model, *common))
    if not target.exists():
        progress("quantizing the GGUF file")
        _run(folder, target, ("--type", file_type.value, "--plain", str(plain), *common))


def _run(folder: BoundedFolder, target: Path, arguments: Sequence[str]) -> None:
    """Runs the converter; only who holds the lock calls this."""
    with folder.draft_of(target) as draft:
        command = [sys.executable, "-P", "-m", convert.__name__, "--output", str(draft), *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode == convert.REFUSED:
            raise UnsupportedError(_last_line(done.stdout))
        if done.returncode:
            why = _last_line(done.stderr) or f"status {done.returncode}"
            raise OptiGPUError(f"The GGUF file could not be written: {why}")
        folder.admit(draft)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


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
