"""Sequences that join and leave llama.cpp's batches, through its C interface: a server's work without the server."""

import ctypes
from collections.abc import Sequence

import llama_cpp
import numpy as np

from optigpu.backends.llama_cpp.model import GgufModel
from optigpu.vocabulary import OptiGPUError


class LlamaPlaces:
    """Places for `count` sequences of at most `length` tokens each, with llama.cpp's default cache and attention."""

    def __init__(self, model: GgufModel, count: int, length: int, threads: int) -> None:
        self._vocabulary = model.vocabulary
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = count * length
        parameters.n_batch = max(count, length)
        parameters.n_seq_max = count
        parameters.n_threads = parameters.n_threads_batch = threads
        self._handle = llama_cpp.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            raise OptiGPUError(
                f"llama.cpp could not make a context for {count} sequences of {length} tokens."
            )
        self._memory = llama_cpp.llama_get_memory(self._handle)
        self._batch = llama_cpp.llama_batch_init(parameters.n_batch, 0, 1)
        self._last: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        """The prefill of a sequence: its first token."""
        rows = [(token, slot, place) for place, token in enumerate(prompt)]
        (self._last[slot],) = self._decoded(rows, [len(rows) - 1])
        self._lengths[slot] = len(prompt)
        return self._last[slot]

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        """The next token of each sequence, all in one batch."""
        rows = [(self._last[slot], slot, self._lengths[slot]) for slot in slots]
        chosen = self._decoded(rows, range(len(rows)))
        for slot, token in zip(slots, chosen, strict=True):
            self._last[slot] = token
            self._lengths[slot] += 1
        return chosen

    def leave(self, slot: int) -> None:
        """The sequence ends."""
        del self._last[slot], self._lengths[slot]
        llama_cpp.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def close(self) -> None:
        """Frees keys and values."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._handle)

    def _decoded(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> list[int]:
        """The most likely tokens after the wanted ones of (token, sequence, position)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, slot, place) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, place
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, slot
            batch.logits[index] = index in wanted
        status = llama_cpp.llama_decode(self._handle, batch)
        if status:
            raise OptiGPUError(
                f"llama.cpp could not decode {len(rows)} tokens: llama_decode returned {status}."
            )
        return [self._most_likely(index) for index in wanted]

    def _most_likely(self, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._handle, ctypes.c_int32(index))
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())
