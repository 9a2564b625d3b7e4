"""Decoders in float32 that an engine's converter writes for so many sequences of so many tokens: one for each shape."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter
from optigpu.backends.converter_program import converter_parser, model_arguments
from optigpu.techniques.base import engine_options
from optigpu.vocabulary import UnsupportedError


@dataclass(frozen=True)
class FixedShapes:
    """What a converter writes, whose program reads `fixed_shape_parser`. `doing` says what takes so long."""

    converter: Converter
    doing: str

    def admit(self, order: Order) -> None:
        """Raises UnsupportedError for a stack that changes the numbers of weights: none is written here."""
        weights = engine_options(order.stack).weights
        if weights != "float32":
            raise UnsupportedError(
                f"{self.converter.engine} runs float32 alone here, not {weights}; leave the technique out."
            )

    def made(self, order: Order, rows: int, length: int, progress: Callable[[str], None]) -> Path:
        """The model for `rows` sequences of at most `length` tokens; written if it is not kept already."""
        shape = ("--rows", str(rows), "--length", str(length))
        arguments = (*model_arguments(order), *shape)
        return self.converter.made(order, f"float32-{rows}x{length}", arguments, progress, self.doing)


def fixed_shape_parser(program: str, description: str | None, writes: str) -> argparse.ArgumentParser:
    """The command line of the converter's program."""
    parser = converter_parser(program, description, writes)
    parser.add_argument("--rows", type=int, required=True, help="how many sequences")
    parser.add_argument("--length", type=int, required=True, help="the most tokens of each")
    return parser
