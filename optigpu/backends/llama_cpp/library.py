"""What llama.cpp and its fork ik_llama.cpp have in common, as their C interfaces are asked for it.

Their structures differ, and so does the library behind them, so each has a class of its own.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.file_types import Asked, Form

Handle = int
"""The address of a model or of a context."""


class Batch:
    """The arrays that one call of llama_decode reads: `count` tokens of each of `rows` sequences.

    They must outlive the call.
    """

    def __init__(self, rows: int, count: int) -> None:
        total = rows * count
        self.size = total
        self.tokens = np.zeros((rows, count), np.int32)
        self.positions = np.zeros((rows, count), np.int32)
        self.lengths = np.ones(total, np.int32)
        self._sequences = np.arange(rows, dtype=np.int32)
        addresses = self._sequences.ctypes.data + self._sequences.itemsize * np.arange(rows, dtype=np.uintp)
        self.sequences = np.repeat(addresses.astype(np.uintp), count)
        self.wanted = np.zeros((rows, count), np.int8)
        self.wanted[:, -1] = 1

    def fields(self) -> dict[str, object]:
        """The members of the structure llama_batch, which both libraries name alike."""
        return {
            "n_tokens": self.size,
            "token": _pointer(self.tokens, ctypes.c_int32),
            "pos": _pointer(self.positions, ctypes.c_int32),
            "n_seq_id": _pointer(self.lengths, ctypes.c_int32),
            "seq_id": _pointer(self.sequences, ctypes.POINTER(ctypes.c_int32)),
            "logits": _pointer(self.wanted, ctypes.c_int8),
        }


@dataclass(frozen=True)
class Quantizing:
    """A file of F16 to be quantized into another.

    `importance` has for each matrix, by its name in the file, how much each of its inputs matters; None: all alike.
    """

    plain: Path
    output: Path
    form: Form
    threads: int
    importance: dict[str, NDArray[np.float32]] | None = None


class Library(Protocol):
    """One of the two. A handle is None where the library gave none; it prints why on stderr."""

    title: str
    """Its name in sentences."""

    def load(self, path: Path) -> Handle | None:
        """A model from a file."""

    def free_model(self, model: Handle) -> None:
        """Its contexts must be freed before."""

    def context(self, model: Handle, rows: int, length: int, asked: Asked) -> Handle | None:
        """Space for `rows` sequences of `length` tokens."""

    def free(self, context: Handle) -> None:
        """Gives the memory of the sequences back."""

    def clear(self, context: Handle) -> None:
        """Forgets the sequences."""

    def batch(self, arrays: Batch) -> object:
        """The library's structure over these arrays."""

    def decode(self, context: Handle, batch: object) -> int:
        """Appends a batch to the sequences; the status is 0 when that worked."""

    def logits(self, context: Handle, rows: int, vocabulary: int) -> NDArray[np.float32]:
        """What the last batch gave, [rows, vocabulary], in the library's memory."""

    def type_name(self, number: int) -> str:
        """A tensor's type by its number in a file."""

    def flags(self) -> str:
        """What the library says that it was built with."""

    def quantize(self, order: Quantizing) -> bool:
        """Writes a quantized file; whether that worked."""


def named(ggml: ctypes.CDLL, number: int, count: int) -> str:
    """The name of a tensor's type, of either library's ggml, which has `count` of them and checks no number."""
    ggml.ggml_type_name.restype = ctypes.c_char_p
    ggml.ggml_type_name.argtypes = [ctypes.c_int]
    found: bytes | None = ggml.ggml_type_name(number) if number < count else None
    return found.decode() if found else f"type {number}"


def _pointer(array: NDArray[np.generic], kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
