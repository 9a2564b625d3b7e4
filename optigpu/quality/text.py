"""The names of the texts on which quality is measured, and the bytes of datasets."""

import bz2
import hashlib
import importlib
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from optigpu.variables import hub_refusal
from optigpu.vocabulary import Document, OptiGPUError

DATASETS_DIR = "OPTIGPU_DATASETS_DIR"
SELF_WRITTEN, WIKITEXT, HELLASWAG, FILE_PREFIX = "self", "wikitext-2", "hellaswag", "file:"
_FILES = {WIKITEXT: "wikitext-2/test.txt", HELLASWAG: "hellaswag/hellaswag_val_full.txt.bz2"}


@dataclass(frozen=True)
class Source:
    """The raw bytes of a dataset, and their origin: a path in the datasets folder, or a hub repository."""

    origin: str
    content: bytes

    @property
    def sha256(self) -> str:
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
    """Reads from the datasets folder, or the hub without one. Raises OptiGPUError for what is missing or leads
    outside."""
    root = os.environ.get(DATASETS_DIR)
    if not root:
        if text not in _FILES:
            raise OptiGPUError(f"{text} is read from the datasets folder; set {DATASETS_DIR} for the worker.")
        return Source(*read_hub(text, _FILES[text]))
    name = _FILES.get(text, text.removeprefix(FILE_PREFIX))
    path = (Path(root) / name).resolve()
    if not path.is_relative_to(Path(root).resolve()):
        raise OptiGPUError(f"{name} is outside of {DATASETS_DIR}; move the file into it.")
    try:
        return Source(name, path.read_bytes())
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise OptiGPUError(
            f"{name} under {DATASETS_DIR} cannot be read ({why}); put the file there."
        ) from error


_REPOSITORIES: dict[str, tuple[str, str | None, str]] = {
    "wikitext-2": ("Salesforce/wikitext", "wikitext-2-v1", "test"),
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
}
"""Repository, configuration and split."""


def read_hub(text: str, file: str) -> tuple[str, bytes]:
    """A dataset's origin, and its rows as `file` has them. Raises OptiGPUError without `datasets`, permission or
    answer."""
    name, configuration, split = _REPOSITORIES[text]
    if refusal := hub_refusal(name):
        raise OptiGPUError(f"{refusal} Or set OPTIGPU_DATASETS_DIR to a folder that holds {file}.")
    if importlib.util.find_spec("datasets") is None:
        raise OptiGPUError(
            f"The dataset {text} was not found: set OPTIGPU_DATASETS_DIR to a folder that holds {file}, or install "
            "the package datasets to read it from the hub."
        )
    try:
        rows: Any = importlib.import_module("datasets").load_dataset(name, configuration, split=split)
    except Exception as error:  # any error of a download
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OptiGPUError(
            f"{text} cannot be read from the hub ({why}); set OPTIGPU_DATASETS_DIR to a folder that holds {file}."
        ) from error
    return f"hub:{name}", wikitext_file(rows) if text == "wikitext-2" else hellaswag_file(rows)


def wikitext_file(rows: Iterable[Document]) -> bytes:
    return "".join(row["text"] for row in rows).encode()


def hellaswag_file(rows: Iterable[Document]) -> bytes:
    """The rows of Rowan/hellaswag in the format that `optigpu.quality.hellaswag` reads."""
    lines: list[str] = []
    for row in rows:
        lines += [f"{row['activity_label']}: {row['ctx']}", str(row["label"]), *row["endings"]]
    return bz2.compress("\n".join(" ".join(line.split()) for line in lines).encode())
