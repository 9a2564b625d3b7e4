"""MLPerf Tiny's profiles: what the runner sends, how often it infers, and what quality its closed division asks for.
Source: mlcommons/tiny, benchmark/runner/tests_performance.yaml and its rules for the quality targets."""

from enum import StrEnum
from typing import Literal

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
