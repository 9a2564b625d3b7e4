"""The program of an order: what it is exported for, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter
from optigpu.backends.executorch import export
from optigpu.techniques.base import engine_options
from optigpu.vocabulary import UnsupportedError

CONVERTER = Converter(
    engine="executorch",
    program=export.__name__,
    suffix=".pte",
    sources=(Path(export.__file__), Path(export.__file__).with_name("cached.py")),
    libraries=("torch", "transformers", "executorch"),
)


@dataclass(frozen=True)
class Program:
    """A program for `rows` sequences of at most `length` tokens; its weights and its cache are float32."""

    model: str
    seed: int
    rows: int
    length: int
    threads: int

    @property
    def form(self) -> str:
        """What tells programs of one model apart."""
        return f"float32-{self.rows}x{self.length}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the exporter's command line."""
        sizes = ("--rows", str(self.rows), "--length", str(self.length), "--threads", str(self.threads))
        return ("--model", self.model, "--seed", str(self.seed), *sizes)


def program_of(order: Order, rows: int, length: int) -> Program:
    """Raises UnsupportedError for a stack that changes the numbers of weights: none is exported here."""
    weights = engine_options(order.stack).weights
    if weights != "float32":
        raise UnsupportedError(
            f"executorch exports float32 alone here, not {weights}; leave the technique out."
        )
    return Program(str(order.model), order.seed, rows, length, order.threads)


def written(order: Order, program: Program, progress: Callable[[str], None]) -> Path:
    """The program's file; exported if it is not kept already."""
    return CONVERTER.made(order, program.form, program.arguments, progress, "exporting the program")
