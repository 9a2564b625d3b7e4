"""The numbers that a decoder's matrices are stored and multiplied in. Imports no ONNX Runtime."""

from dataclasses import dataclass
from typing import Self

from optigpu.techniques.base import Technique, engine_options
from optigpu.vocabulary import UnsupportedError

_BITS = {"float32": 32, "int8": 8, "int4": 4}
_ACCURACY = {"float": 1, "int8": 4}
DEFAULT_GRAPH = "all"
"""ONNX Runtime's own default: all rewritings of the graph."""


@dataclass(frozen=True)
class Format:
    """`group` inputs of an output share a scale; `accuracy_level` is MatMulNBits' word for what it multiplies.

    Both are 0 in float32.
    """

    bits: int
    group: int = 0
    accuracy_level: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """The format of that name."""
        return cls(*map(int, text.split("-")))

    @property
    def name(self) -> str:
        """Such as "4-32-4"; part of a kept model's name."""
        return f"{self.bits}-{self.group}-{self.accuracy_level}"

    @property
    def is_float(self) -> bool:
        """Whether matrices stay as they are."""
        return self.bits == 32

    @property
    def product_dtypes(self) -> tuple[str, ...]:
        """What is multiplied besides floats: activations are rounded to int8 at accuracy level 4."""
        return ("int8",) if self.accuracy_level == _ACCURACY["int8"] else ()


def format_of(stack: tuple[Technique, ...]) -> Format:
    """What a stack asks for; float32 without a technique that says otherwise.

    Raises UnsupportedError for numbers that MatMulNBits does not store.
    """
    options = engine_options(stack)
    bits = _BITS.get(options.weights)
    if bits is None:
        raise UnsupportedError(
            f"onnxruntime does not support weights of the type {options.weights}; choose one of {', '.join(_BITS)}."
        )
    if bits == 32:
        return Format(bits)
    return Format(bits, options.group, _ACCURACY[options.products or "int8"])


def graph_level_of(stack: tuple[Technique, ...]) -> str:
    """How far a session rewrites the graph."""
    return engine_options(stack).graph or DEFAULT_GRAPH
