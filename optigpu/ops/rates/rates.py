"""How fast this CPU reads, copies and multiplies in loops of our own (rates.cpp), which wait for nothing else.

loops = RateLoops(threads=2)
seconds = loops.read_s(array, passes=10, way="plain")
operations = loops.operations("int8 AVX-512 VNNI")      # of a round; 0 without the instructions
seconds = loops.multiply_s("int8 AVX-512 VNNI", rounds=100_000)

The threads of a torch operator meet once for each call, which takes longer than reading a megabyte from a cache; and a
product of matrices moves numbers besides multiplying them.
"""

import ctypes
from typing import Literal

import torch

from optigpu.ops.build import load_library, sources
from optigpu.ops.operands import named
from optigpu.vocabulary import UnsupportedError

Way = Literal["plain", "other"]
"""Of reading: without and with prefetches. Of copying: a loop and the C library's."""
WAYS: dict[Way, int] = {"plain": 0, "other": 1}
PRODUCTS: dict[str, tuple[str, int]] = {
    "float32 loop": ("float32", 0),
    "float32 AVX2": ("float32", 1),
    "float32 AVX-512": ("float32", 2),
    "bfloat16 AVX-512": ("bfloat16", 3),
    "int8 AVX2": ("int8", 4),
    "int8 AVX-512 VNNI": ("int8", 5),
}
"""The dtype of what each loop multiplies, and the loop's number; the enumeration Product in rates.cpp."""
SLICE_BYTES = 1024
"""A thread reads a multiple of this many bytes; kSlice in rates.cpp."""

_SOURCES = sources(__file__, "rates.cpp", "rates_kernel.h")
_int64, _pointer, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_FUNCTIONS: dict[str, tuple[tuple[type, ...], type]] = {
    "read": ((_pointer, _int64, _int64, _int64, _int64), _double),
    "copy": ((_pointer, _pointer, _int64, _int64, _int64, _int64), _double),
    "multiply": ((_int64, _int64, _int64), _double),
    "operations": ((_int64,), _int64),
}
"""The types of the arguments and the result of the functions optigpu_rates_*."""


class RateLoops:
    """The loops on so many threads. Raises UnsupportedError where they cannot be built."""

    def __init__(self, threads: int) -> None:
        library = load_library(_SOURCES)
        self.threads = threads
        self._functions = {}
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(library, f"optigpu_rates_{name}")
            function.argtypes, function.restype = arguments, result
            self._functions[name] = function

    def read_s(self, array: torch.Tensor, passes: int, way: Way) -> float:
        """Seconds in which the threads read their parts of an array so many times each."""
        return self._timed("read", _address(array), array.nbytes, passes, self.threads, WAYS[way])

    def copy_s(self, target: torch.Tensor, source: torch.Tensor, passes: int, way: Way) -> float:
        """Seconds in which the threads copy their parts of `source` so many times each."""
        if target.nbytes != source.nbytes:
            raise ValueError(f"A copy of {named(source)} does not fit {named(target)}.")
        arguments = (_address(target), _address(source), source.nbytes, passes, self.threads, WAYS[way])
        return self._timed("copy", *arguments)

    def operations(self, product: str) -> int:
        """Operations of a round on all threads; 0 where this CPU lacks the instructions."""
        return int(self._functions["operations"](PRODUCTS[product][1])) * self.threads

    def multiply_s(self, product: str, rounds: int) -> float:
        """Seconds in which each thread does so many rounds of products of numbers in registers."""
        return self._timed("multiply", PRODUCTS[product][1], rounds, self.threads)

    def _timed(self, name: str, *arguments: int) -> float:
        seconds = float(self._functions[name](*arguments))
        if seconds < 0:
            raise UnsupportedError(f"{self.threads} threads for measuring peak rates could not be started.")
        return seconds


def _address(array: torch.Tensor) -> int:
    if array.device.type != "cpu" or not array.is_contiguous() or array.nbytes % SLICE_BYTES:
        raise ValueError(
            f"The loops need contiguous arrays on the CPU whose bytes are a multiple of {SLICE_BYTES}, not "
            f"{named(array)}."
        )
    return array.data_ptr()
