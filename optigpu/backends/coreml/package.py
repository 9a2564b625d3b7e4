"""Packages for Core ML, written once and kept, each in a folder; and what one answers."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from optigpu.backends import traced
from optigpu.backends.converted import Converter
from optigpu.backends.coreml import convert
from optigpu.backends.fixed_shapes import FixedShapes
from optigpu.backends.runtime import Logits
from optigpu.vocabulary import OptiGPUError

INPUT, OUTPUT = "ids", "logits"
"""The names of the package's input and output."""
CONVERTER = Converter(
    engine="coreml",
    program=convert.__name__,
    suffix=".coreml",
    sources=(
        Path(convert.__file__),
        Path(convert.__file__).with_name("whole_pass.py"),
        Path(traced.__file__),
    ),
    libraries=("torch", "transformers", "coremltools"),
)
PACKAGES = FixedShapes(CONVERTER, "converting the model")
"""Each is for sequences of exactly its length, the last tokens of which may be filling."""


def logits_in(answer: Mapping[str, object], position: int) -> Logits:
    """The logits after the token at `position` of each sequence, [rows, vocabulary], from an answer of the package.

    Raises OptiGPUError for an answer without them.
    """
    found = answer.get(OUTPUT)
    if not isinstance(found, np.ndarray) or found.ndim != 3:
        names = ", ".join(answer) or "nothing"
        raise OptiGPUError(
            f"Core ML answered with {names} instead of logits of each token; convert it again."
        )
    logits: Logits = found[:, position].astype(np.float32)
    return logits
