"""What llama.cpp and its fork ik_llama.cpp have in common, as their C interfaces are asked for it.

Their structures differ, and so does the library behind them, so each has a class of its own.
"""

import ctypes
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.gguf_facts import Asked, Form

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


class Library(ABC):
    """One of the two. It prints its errors on stderr, and nothing else."""

    title: ClassVar[str]
    """Its name in sentences."""

    def __init__(self, api: ModuleType, ggml: ctypes.CDLL) -> None:
        """`api` are the bindings, whose functions have the names of the C interface."""
        self._api, self._ggml = api, ggml
        api.llama_backend_init()

    def load(self, path: Path) -> Handle:
        """A model from a file, with the library's defaults. Raises RuntimeError with the library's reason."""
        defaults = self._api.llama_model_default_params()
        _SAID.clear()
        found: Handle | None = self._api.llama_model_load_from_file(str(path).encode(), defaults)
        if not found:
            raise RuntimeError(_reason(_SAID))
        return found

    @abstractmethod
    def free_model(self, model: Handle) -> None:
        """Frees the weights; the model's contexts must be freed before."""

    def context(self, model: Handle, rows: int, length: int, asked: Asked) -> Handle | None:
        """Space for `rows` sequences of `length` tokens, with a batch as long as all of them together.

        Raises UnsupportedError for an attention on which the library would end the process.
        """
        parameters = self._api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = rows * length
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = asked.threads
        if asked.keys:
            parameters.type_k = self.type_number(asked.keys)
        if asked.values:
            parameters.type_v = self.type_number(asked.values)
        self._attend(parameters, rows, asked.attention)
        if asked.together:
            parameters.n_ubatch = asked.together
        found: Handle | None = self._api.llama_init_from_model(model, parameters)
        return found

    def free(self, context: Handle) -> None:
        """Frees the keys and values."""
        self._api.llama_free(context)

    @abstractmethod
    def clear(self, context: Handle) -> None:
        """Forgets the sequences."""

    def batch(self, arrays: Batch) -> object:
        """A llama_batch over these arrays."""
        return self._api.llama_batch(**arrays.fields())

    def decode(self, context: Handle, batch: object) -> int:
        """Appends a batch to the sequences; the status is 0 when that worked."""
        return int(self._api.llama_decode(context, batch))

    @abstractmethod
    def logits(self, context: Handle, rows: int, vocabulary: int) -> NDArray[np.float32]:
        """What the last batch gave, [rows, vocabulary], in the library's memory."""

    def type_name(self, number: int) -> str:
        """A tensor's type by its number in a file."""
        name = self._ggml.ggml_type_name  # it checks no number
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_int]
        found: bytes | None = name(number) if number < self.types() else None
        return found.decode() if found else f"type {number}"

    def type_number(self, name: str) -> int:
        """A tensor's type by its name in capitals."""
        return next(number for number in range(self.types()) if self.type_name(number).upper() == name)

    @abstractmethod
    def types(self) -> int:
        """How many types of tensors there are."""

    @abstractmethod
    def file_types(self) -> dict[int, str]:
        """The names of files' types by their numbers."""

    @abstractmethod
    def flags(self) -> str:
        """What the library says that it was built with."""

    @abstractmethod
    def quantize(self, order: Quantizing) -> bool:
        """Writes a quantized file; whether that worked."""

    @abstractmethod
    def _attend(self, parameters: ctypes.Structure, rows: int, attention: str | None) -> None:
        """Asks for an attention; None: the library chooses."""


_ERROR = 4
"""ggml's log level of errors."""
_LOADING = "error loading model: "
_SAID: deque[str] = deque(maxlen=8)
"""The library's last errors; its log is one for all that it does."""


def _print_error(level: int, text: bytes, _data: object) -> None:
    if level == _ERROR:
        said = text.decode(errors="replace")
        _SAID.append(said.strip())
        sys.stderr.write(said)


def _reason(said: Sequence[str]) -> str:
    """Why a file could not be loaded, of the errors that the library printed."""
    reasons = [line.partition(_LOADING)[2] for line in said if _LOADING in line]
    return (reasons or list(said) or ["it gives no reason"])[0].rstrip(".")


print_errors = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_print_error)
"""What a library is given as its log. It keeps the address, so this lives as long as the process."""


def _pointer(array: NDArray[np.generic], kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
