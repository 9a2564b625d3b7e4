"""A GGUF file in llama.cpp or its fork, through the C interface that they share."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.base import Order
from optigpu.backends.converted import whole
from optigpu.backends.llama_cpp.engine import Engine
from optigpu.backends.llama_cpp.file_types import Asked, asked_of, product_dtypes_of
from optigpu.backends.llama_cpp.library import Batch, Library
from optigpu.backends.llama_cpp.source import Source, source_of
from optigpu.backends.stepped import Loaded, SteppedRuntime
from optigpu.documents.shapes import Footprint
from optigpu.ops.layouts import GGUF_BLOCKS, GgufBlock
from optigpu.techniques.base import Notes
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError, UnsupportedError

_CACHE_DTYPES = {"F32": "float32", "F16": "float16", "Q8_0": "q8_0", "Q4_0": "q4_0"}
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


def prepared(order: Order, engine: Engine, progress: Callable[[str], None]) -> SteppedRuntime:
    """Writes the GGUF file if it is not there, and loads it.

    Raises UnsupportedError for a model or a stack that the engine cannot run, OptiGPUError when writing fails.
    """
    library = engine.open()
    source = source_of(order, engine, library, progress)
    asked = asked_of(order.stack, source.type, order.threads, engine.exact)
    progress("loading")
    model = _loaded(library, source)
    contents = source.contents
    loaded = Loaded(
        engine=library.title,
        facts=source.facts,
        steps=lambda rows, length: Context(model, rows, length, asked),
        weights=source.weights,
        footprint=Footprint(
            source.facts, contents.streamed_bytes, contents.row_bytes, product_dtypes_of(source.type)
        ),
    )
    return SteppedRuntime(order, loaded, _notes(engine, library, source, asked))


def _notes(engine: Engine, library: Library, source: Source, asked: Asked) -> Notes:
    keys, values = asked.keys or "F16", asked.values or "F16"
    width = source.facts.layers * source.facts.kv_heads * source.facts.head_size
    dtypes = dict.fromkeys((_CACHE_DTYPES[keys], _CACHE_DTYPES[values]))
    notes = Notes()
    notes.record(
        dtype=source.dtype,
        kv_cache=library.title,
        kv_cache_dtype=", ".join(dtypes),
        kv_cache_bytes_per_token=_bytes(width, keys) + _bytes(width, values),
        decode_loop=library.title,
        decode_operator="llama_decode",
        threads=asked.threads,
        versions={engine.package: version(engine.package)},
        gguf_type=source.type,
        gguf_tensor_types=source.contents.types,
        reasons=dict.fromkeys(
            ("attn_implementation", "attention_kernels"),
            f"{library.title} does not say which kernels of attention run.",
        ),
        **{f"{engine.name}_flags": library.flags()},
    )
    if asked.attention:
        notes.record(flash_attention=asked.attention == "fused")
    if asked.together:
        notes.record(prompt_tokens_together=asked.together)
    return notes


def _bytes(width: int, kind: GgufBlock) -> int:
    """Of one token's keys or values."""
    block, size = GGUF_BLOCKS[kind]
    return width // block * size


def _loaded(library: Library, source: Source) -> GgufModel:
    if source.written:
        with whole(source.path, library.title):
            return GgufModel(library, source.path, source.facts.vocabulary)
    try:
        return GgufModel(library, source.path, source.facts.vocabulary)
    except RuntimeError as error:
        raise UnsupportedError(
            f"{library.title} cannot load {source.path.name}: {error}; name another file."
        ) from error
