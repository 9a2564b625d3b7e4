"""The coreml backend: models as Core ML packages, on a Mac. Packages are written once for each shape and kept.

It has never run on a machine of this project: `optigpu selftest` checks it where it is installed. Only `start` and
`prepare` import it.
"""

import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, model_arguments
from optigpu.backends.engine import EngineBackend
from optigpu.backends.runtime import Logits
from optigpu.documents.result import Environment
from optigpu.techniques.base import engine_options
from optigpu.vocabulary import OptiGPUError, UnsupportedError


class CoreMlBackend(EngineBackend):
    """Runs passes over whole sequences: the package has no cache, and says so in the facts."""

    name = "coreml"
    summary = "Core ML packages without a cache, on a Mac"
    packages = ("coremltools",)
    install = 'pip install -e ".[coreml]"'
    workloads = ("generate", "quality")

    def missing(self, environment: Environment) -> str | None:
        """A Mac, or the package."""
        if platform.system() != "Darwin":
            return f"coreml runs on macOS alone, and this is {platform.system()}; ask a worker on a Mac."
        return super().missing(environment)


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
