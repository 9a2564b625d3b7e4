"""A GGUF file in llama.cpp, through llama.cpp's own C interface."""

import ctypes
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.log import print_errors_only
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError, UnsupportedError

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


class LlamaCppModel:
    """The weights of a GGUF file. `vocabulary` counts its tokens."""

    def __init__(self, path: Path) -> None:
        """Raises UnsupportedError when llama.cpp cannot load the file."""
        print_errors_only()
        llama_cpp.llama_backend_init()
        defaults = llama_cpp.llama_model_default_params()
        self.handle = llama_cpp.llama_model_load_from_file(str(path).encode(), defaults)
        if not self.handle:
            raise UnsupportedError(f"llama.cpp cannot load {path.name}.")
        vocabulary = llama_cpp.llama_model_get_vocab(self.handle)
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(vocabulary))

    def close(self) -> None:
        """Frees the weights; their contexts must be closed before."""
        llama_cpp.llama_model_free(self.handle)


class Context:
    """`rows` sequences of at most `length` tokens that are decoded together."""

    def __init__(self, model: LlamaCppModel, rows: int, length: int, threads: int, exact: bool) -> None:
        """With `exact`, keys, values and attention are float32; without, llama.cpp's defaults: a float16 cache.

        Raises OutOfMemoryError when llama.cpp cannot make it.
        """
        self.rows, self.length = rows, length
        self._vocabulary = model.vocabulary
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = rows * length
        parameters.n_batch = rows * length
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = threads
        if exact:
            parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._handle = llama_cpp.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise OutOfMemoryError(
                f"out of memory: llama.cpp could not make a context for {rows} sequences of {length} tokens."
            )
        self._used = 0
        self._batches: dict[int, _Batch] = {}

    def begin(self) -> None:
        """Forgets the sequences."""
        self._used = 0
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._handle), True)

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count] to the sequences. Logits after the last token of each, [rows, vocabulary].

        They lie in llama.cpp's memory and are valid until the next call. Raises OptiGPUError when the sequences would
        become longer than the context, or a token is none of the vocabulary.
        """
        count = tokens.shape[1]
        if tokens.shape[0] != self.rows or self._used + count > self.length:
            raise OptiGPUError(
                f"This context holds {self.rows} sequences of {self.length} tokens; {tokens.shape[0]} sequences of "
                f"{self._used + count} tokens do not fit."
            )
        batch = self._batches.get(count)
        if batch is None:
            batch = self._batches[count] = _Batch(self.rows, count)
        batch.tokens[:] = tokens
        status = llama_cpp.llama_decode(self._handle, batch.handle)
        if status:
            raise OptiGPUError(f"llama.cpp could not decode {count} tokens: llama_decode returned {status}.")
        self._used += count
        logits = llama_cpp.llama_get_logits(self._handle)
        return np.ctypeslib.as_array(logits, (self.rows, self._vocabulary))

    def close(self) -> None:
        """Frees the keys and values."""
        llama_cpp.llama_free(self._handle)


class _Batch:
    """The arrays that llama_decode reads for `count` tokens of each of `rows` sequences; they must outlive the call."""

    def __init__(self, rows: int, count: int) -> None:
        total = rows * count
        self.tokens = np.zeros((rows, count), np.int32)
        self._lengths = np.ones(total, np.int32)
        self._sequences = np.arange(rows, dtype=np.int32)
        addresses = self._sequences.ctypes.data + self._sequences.itemsize * np.arange(rows, dtype=np.uintp)
        self._of_token = np.repeat(addresses.astype(np.uintp), count)
        self._wanted = np.zeros((rows, count), np.int8)
        self._wanted[:, -1] = 1
        # Without positions llama.cpp appends to each sequence.
        self.handle = llama_cpp.llama_batch(
            n_tokens=total,
            token=_pointer(self.tokens, ctypes.c_int32),
            n_seq_id=_pointer(self._lengths, ctypes.c_int32),
            seq_id=_pointer(self._of_token, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._wanted, ctypes.c_int8),
        )


def _pointer(array: NDArray[np.generic], kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
