"""MLPerf Tiny's profiles: what the runner sends, how often it infers, and what quality its closed division asks for.
Source: mlcommons/tiny, benchmark/runner/tests_performance.yaml and its rules for the quality targets. And inputs with
labels: a .npz file with `inputs` [samples, ...] of the profile's type and, for accuracy, `labels` [samples]; or a
folder with raw files and `y_labels.csv`, which has the columns file, classes, class, and for ad01 the bytes of a
segment and its stride."""

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile

import numpy as np

from optigpu.documents.fields import closest, did_you_mean
from optigpu.vocabulary import Frozen, SpecError

MOST_BYTES = 27_648
"""The largest input that the protocol carries: 96 x 96 x 3."""


class Quality(StrEnum):
    """How a profile's answers are judged."""

    TOP1 = "top1"
    AUC = "auc"


class Profile(Frozen):
    """One benchmark: its input's type and bytes, the warm-up before a timed run, and the quality target."""

    name: str
    task: str
    dtype: Literal["uint8", "int8", "float32"]
    input_bytes: int
    warmup: int
    quality: Quality
    target: float

    def bytes_of(self, sample: np.ndarray) -> bytes:
        """A sample as the runner sends it. Raises SpecError for another type of numbers, or too large a sample."""
        wanted = np.dtype(self.dtype)
        if sample.dtype != wanted:
            raise SpecError(f"{self.name} takes inputs of {self.dtype}; these are {sample.dtype}.")
        data = np.ascontiguousarray(sample).astype(wanted.newbyteorder("<"), copy=False).tobytes()
        if len(data) > MOST_BYTES:
            raise SpecError(f"An input has {len(data)} bytes; the protocol carries at most {MOST_BYTES}.")
        return data


_ALL = (
    ("ic01", "image classification", "uint8", 3072, 5, Quality.TOP1, 0.85),
    ("vww01", "person detection", "uint8", 27_648, 5, Quality.TOP1, 0.80),
    ("kws01", "keyword spotting", "int8", 490, 10, Quality.TOP1, 0.90),
    ("ad01", "anomaly detection", "float32", 2560, 10, Quality.AUC, 0.85),
)
"""By the fields of Profile, in their order."""
PROFILES = {
    each[0]: Profile.model_validate(dict(zip(Profile.model_fields, each, strict=True))) for each in _ALL
}


def profile_of(name: str) -> Profile:
    """The profile of that name. Raises SpecError that lists the valid ones."""
    if name not in PROFILES:
        hint = did_you_mean(closest(name, PROFILES))
        streaming = " sww01 streams audio through an interface board." if name.startswith("sww") else ""
        raise SpecError(f"Unknown profile {name!r}.{hint} Valid: {', '.join(PROFILES)}.{streaming}")
    return PROFILES[name]


LABELS = "y_labels.csv"


@dataclass(frozen=True)
class Sample:
    """What is sent for one sample, in one or several segments, and its label if it has one."""

    segments: tuple[bytes, ...]
    label: int | None


def read_samples(path: Path, profile: Profile, limit: int | None = None) -> list[Sample]:
    """The samples of a file or folder, at most `limit`. Raises SpecError that says what is wrong with it."""
    samples = _from_folder(path) if os.path.isdir(path) else _from_arrays(path, profile)
    found = [sample for sample, _ in zip(samples, range(limit or 10**9), strict=False)]
    if not found:
        raise SpecError(f"{path} holds no samples.")
    return found


def labels_of(samples: Sequence[Sample], path: Path) -> list[int]:
    """Every sample's label. Raises SpecError where one has none."""
    labels = [sample.label for sample in samples]
    known = [label for label in labels if label is not None]
    if len(known) != len(labels):
        raise SpecError(
            f"{path} holds no labels: accuracy needs an array `labels`, a whole number for each input."
        )
    return known


def _from_arrays(path: Path, profile: Profile) -> Iterator[Sample]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in ("inputs", "labels") if name in arrays}
    except (OSError, ValueError, EOFError, BadZipFile, AttributeError) as error:
        raise SpecError(f"{path} is not a .npz file that can be read: {error}.") from error
    if "inputs" not in found:
        raise SpecError(f"{path} holds no array `inputs`.")
    inputs, labels = found["inputs"], found.get("labels")
    if inputs.ndim < 2:
        raise SpecError(
            f"{path}: `inputs` needs a dimension of samples and one of values; it has {inputs.ndim}."
        )
    if labels is not None and (labels.shape != (len(inputs),) or labels.dtype.kind not in "iu"):
        raise SpecError(
            f"{path}: `labels` must be {len(inputs)} whole numbers; it is {labels.dtype}{labels.shape}."
        )
    for place, each in enumerate(inputs):
        yield Sample((profile.bytes_of(each),), None if labels is None else int(labels[place]))


def _from_folder(folder: Path) -> Iterator[Sample]:
    try:
        with (folder / LABELS).open(newline="") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{folder / LABELS} cannot be read: {error}.") from error
    for number, row in enumerate(rows, 1):
        place = f"line {number} of {folder / LABELS}"
        if len(row) not in (3, 5) or not all(cell.isdecimal() for cell in row[1:]):
            raise SpecError(f"{place} is not: file, classes, class (and for ad01 bytes, stride).")
        segment, stride = (int(row[3]), int(row[4])) if len(row) == 5 else (0, 0)
        path = folder / row[0]
        if not path.resolve().is_relative_to(folder.resolve()):
            raise SpecError(f"{place} names {row[0]}, which lies outside of the folder.")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise SpecError(f"{place} names {row[0]}, which cannot be read: {error.strerror}.") from error
        yield Sample(_segments(data, segment, stride, place), int(row[2]))


def _segments(data: bytes, segment: int, stride: int, place: str) -> tuple[bytes, ...]:
    """The file whole, or windows of `segment` bytes that begin every `stride` bytes."""
    if segment == 0:
        found: tuple[bytes, ...] = (data,)
    elif stride == 0:
        raise SpecError(f"{place}: the stride must not be 0.")
    else:
        found = tuple(data[at : at + segment] for at in range(0, len(data) - segment + 1, stride))
    if not found or not 0 < len(found[0]) <= MOST_BYTES:
        raise SpecError(f"{place}: an input must have 1 to {MOST_BYTES} bytes.")
    return found
