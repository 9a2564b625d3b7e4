"""The package of an order: what it is converted for, as plain data; and what it answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter
from optigpu.backends.coreml import convert
from optigpu.backends.runtime import Logits
from optigpu.techniques.base import engine_options
from optigpu.vocabulary import OptiGPUError, UnsupportedError

INPUT, OUTPUT = "ids", "logits"
"""The names of the package's input and output."""
CONVERTER = Converter(
    engine="coreml",
    program=convert.__name__,
    suffix=".mlpackage",
    sources=(Path(convert.__file__),),
    libraries=("torch", "transformers", "coremltools"),
)


@dataclass(frozen=True)
class Package:
    """A package for `rows` sequences of exactly `length` tokens, the last of which may be filling."""

    model: str
    seed: int
    rows: int
    length: int
    threads: int

    @property
    def form(self) -> str:
        """What tells packages of one model apart."""
        return f"float32-{self.rows}x{self.length}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the converter's command line."""
        sizes = ("--rows", str(self.rows), "--length", str(self.length), "--threads", str(self.threads))
        return ("--model", self.model, "--seed", str(self.seed), *sizes)


def package_of(order: Order, rows: int, length: int) -> Package:
    """Raises UnsupportedError for a stack that changes the numbers of weights: none is converted here."""
    weights = engine_options(order.stack).weights
    if weights != "float32":
        raise UnsupportedError(f"coreml converts float32 alone here, not {weights}; leave the technique out.")
    return Package(str(order.model), order.seed, rows, length, order.threads)


def written(order: Order, package: Package, progress: Callable[[str], None]) -> Path:
    """The package's folder; converted if it is not kept already."""
    return CONVERTER.made(order, package.form, package.arguments, progress, "converting the model")


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
