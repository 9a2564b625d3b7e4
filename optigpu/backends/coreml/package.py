"""Packages for Core ML, written once for each shape and kept, each in a folder; and what one answers."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, model_arguments
from optigpu.backends.runtime import Logits
from optigpu.techniques.base import engine_options
from optigpu.vocabulary import OptiGPUError, UnsupportedError

PACKAGE = "model.mlpackage"
"""In the folder: coremltools saves a package under no other ending."""
INPUT, OUTPUT = "ids", "logits"
"""The names of the package's input and output."""
CONVERTER = Converter(
    engine="coreml",
    program="optigpu.backends.coreml.convert",
    suffix=".coreml",
    sources=(Path(__file__).with_name("convert.py"),),
    libraries=("torch", "transformers", "coremltools"),
)


def admit(order: Order) -> None:
    """Raises UnsupportedError for a stack that changes the numbers of weights: packages have float32 alone."""
    weights = engine_options(order.stack).weights
    if weights != "float32":
        raise UnsupportedError(f"coreml runs float32 alone here, not {weights}; leave the technique out.")


def package_of(order: Order, rows: int, length: int, progress: Callable[[str], None]) -> Path:
    """The package for `rows` sequences of exactly `length` tokens, the last of which may be filling."""
    arguments = (*model_arguments(order), "--rows", str(rows), "--length", str(length))
    return CONVERTER.made(order, f"float32-{rows}x{length}", arguments, progress)


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
