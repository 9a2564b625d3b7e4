"""A GGUF file in llama.cpp or in its fork, through the C interface that they share."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.file_types import Asked
from optigpu.backends.llama_cpp.library import Batch, Library
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]


class GgufModel:
    """The weights of a GGUF file. `vocabulary` counts the tokens that it has logits of."""

    def __init__(self, library: Library, path: Path, vocabulary: int) -> None:
        """Raises RuntimeError when the library cannot load the file."""
        handle = library.load(path)
        if not handle:
            raise RuntimeError("it gives no reason beside what it printed")
        self.library, self.handle, self.vocabulary = library, handle, vocabulary

    def close(self) -> None:
        """Frees the weights; their contexts must be closed before."""
        self.library.free_model(self.handle)


class Context:
    """`rows` sequences of at most `length` tokens that are decoded together."""

    def __init__(self, model: GgufModel, rows: int, length: int, asked: Asked) -> None:
        """Raises OutOfMemoryError when the library cannot make it."""
        self.rows, self.length = rows, length
        self._model, self._library = model, model.library
        handle = self._library.context(model.handle, rows, length, asked)
        if not handle:
            raise OutOfMemoryError(
                f"out of memory: {self._library.title} could not make a context for {rows} sequences of {length} "
                "tokens."
            )
        self._handle = handle
        self._used = 0
        self._batches: dict[int, tuple[Batch, object]] = {}

    def begin(self) -> None:
        """Forgets the sequences."""
        self._used = 0
        self._library.clear(self._handle)

    def forward(self, tokens: Ids) -> Logits:
        """Appends `tokens` [rows, count] to the sequences. Logits after the last token of each, [rows, vocabulary].

        They lie in the library's memory and are valid until the next call. Raises OptiGPUError when the sequences would
        become longer than the context, or a token is none of the vocabulary.
        """
        count = tokens.shape[1]
        if tokens.shape[0] != self.rows or self._used + count > self.length:
            raise OptiGPUError(
                f"This context holds {self.rows} sequences of {self.length} tokens; {tokens.shape[0]} sequences of "
                f"{self._used + count} tokens do not fit."
            )
        arrays, batch = self._batch_of(count)
        arrays.tokens[:] = tokens
        arrays.positions[:] = np.arange(self._used, self._used + count)
        status = self._library.decode(self._handle, batch)
        if status:
            raise OptiGPUError(
                f"{self._library.title} could not decode {count} tokens: llama_decode returned {status}."
            )
        self._used += count
        return self._library.logits(self._handle, self.rows, self._model.vocabulary)

    def close(self) -> None:
        """Frees the keys and values."""
        self._library.free(self._handle)

    def _batch_of(self, count: int) -> tuple[Batch, object]:
        """Made once for each number of tokens."""
        known = self._batches.get(count)
        if known is None:
            arrays = Batch(self.rows, count)
            known = self._batches[count] = (arrays, self._library.batch(arrays))
        return known
