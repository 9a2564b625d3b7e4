"""The names of the texts on which quality is measured, and the bytes of datasets."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from optigpu.vocabulary import OptiGPUError

DATASETS_DIR = "OPTIGPU_DATASETS_DIR"
"""The environment variable with the datasets folder."""

SELF_WRITTEN = "self"
WIKITEXT = "wikitext-2"
HELLASWAG = "hellaswag"
FILE_PREFIX = "file:"
_FILES = {WIKITEXT: "wikitext-2/test.txt", HELLASWAG: "hellaswag/hellaswag_val_full.txt.bz2"}


@dataclass(frozen=True)
class Source:
    """The raw bytes of a dataset, and their origin: a path in the datasets folder, or a hub repository."""

    origin: str
    content: bytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the raw bytes, in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    def words(self) -> str:
        """The bytes as text. Raises OptiGPUError if they are not UTF-8."""
        try:
            return self.content.decode()
        except UnicodeDecodeError as error:
            raise OptiGPUError(f"{self.origin} is not UTF-8 text ({error.reason}); convert it.") from error


def check_name(text: str) -> str:
    """The name itself. Raises ValueError if it is unknown or a file outside of the datasets folder."""
    if text in (SELF_WRITTEN, WIKITEXT, HELLASWAG):
        return text
    if not text.startswith(FILE_PREFIX):
        raise ValueError(
            f"unknown text {text!r}; write {SELF_WRITTEN}, {WIKITEXT}, {HELLASWAG} or {FILE_PREFIX}NAME"
        )
    check_inside(text.removeprefix(FILE_PREFIX), f"{text!r} must be a file")
    return text


def check_inside(name: str, subject: str) -> None:
    """Raises ValueError, which begins with `subject`, for a path that leads out of the datasets folder."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"{subject} under {DATASETS_DIR}, written without '..' and not absolute")


def comes_from_hub(text: str) -> bool:
    """Whether a text is downloaded: a dataset, where no folder of datasets is set."""
    return text in _FILES and not os.environ.get(DATASETS_DIR)


def read_source(text: str) -> Source:
    """The dataset that `text` names, from the datasets folder, or from the hub if no folder is set.

    Raises OptiGPUError when it is not there, cannot be read, or leads out of the folder.
    """
    root = os.environ.get(DATASETS_DIR)
    if root:
        return _read_file(Path(root), _FILES.get(text, text.removeprefix(FILE_PREFIX)))
    if text in _FILES:
        from optigpu.quality.hub import read_hub

        origin, content = read_hub(text, _FILES[text])
        return Source(origin, content)
    raise OptiGPUError(f"{text} is read from the datasets folder; set {DATASETS_DIR} for the worker.")


def _read_file(root: Path, name: str) -> Source:
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise OptiGPUError(f"{name} is outside of {DATASETS_DIR}; move the file into it.")
    try:
        return Source(name, path.read_bytes())
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise OptiGPUError(
            f"{name} under {DATASETS_DIR} cannot be read ({why}); put the file there."
        ) from error
