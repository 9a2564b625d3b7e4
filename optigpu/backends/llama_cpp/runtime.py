"""A GGUF file in llama.cpp or its fork, through the C interface that they share."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of, whole
from optigpu.backends.engine import SteppedRuntime, unknown_kernels, weights_of_file
from optigpu.backends.llama_cpp.engine import Engine, gguf_of
from optigpu.backends.llama_cpp.gguf_facts import (
    FLOATS,
    LEFT_OUT,
    Asked,
    CacheType,
    Contents,
    asked_of,
    cache_widths,
    contents_of,
    facts_of,
    form_of,
    norms_of,
)
from optigpu.backends.llama_cpp.gguf_families import written_family
from optigpu.backends.llama_cpp.library import Batch, Library
from optigpu.backends.runtime import Ids, Logits
from optigpu.documents.facts import Footprint, ModelFacts, WeightFacts
from optigpu.models.described import decoder_facts
from optigpu.models.gguf_header import Header
from optigpu.models.held import GGUF, hash_of, model_file
from optigpu.models.reference import ModelReference
from optigpu.ops.layouts import GGUF_BLOCKS
from optigpu.techniques.base import Notes
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError, UnsupportedError


@dataclass(frozen=True)
class Source:
    """A file, what it holds, and the type of its matrices. `written` says that it can be written anew."""

    path: Path
    facts: ModelFacts
    contents: Contents
    type: str
    weights: WeightFacts
    written: bool


def source_of(order: Order, engine: Engine, library: Library, progress: Callable[[str], None]) -> Source:
    """The file of an order, written if it is not there.

    Raises UnsupportedError for a model that the engine cannot run or that cannot be written, a file that is no GGUF
    file of a known architecture, and a type for a file that has one; OptiGPUError when writing fails.
    """
    reference, form = order.reference, form_of(order.stack)
    if reference.kind == "path" and reference.name.endswith(GGUF):
        if form.type != "F32":
            raise UnsupportedError(f"{reference} has the type that it was written with; leave gguf out.")
        return _given(reference, order, engine, library)
    facts = decoder_facts(reference)
    # Raises UnsupportedError for a family that is not written as GGUF, and one that the engine refuses.
    try:
        norm = written_family(facts.family).norm
    except UnsupportedError as error:
        raise UnsupportedError(f"{engine.name} cannot run {reference}: {error}") from error
    _require_norms(reference, (norm,), engine)
    path = gguf_of(order, engine, form, progress)
    with whole(path, library.title):
        contents = contents_of(path, library.type_name)
    figures = {"parameters": contents.parameters, "quantized": contents.quantized}
    own = {"bytes": contents.file_bytes, **figures}
    return Source(path, facts, contents, form.type, weights_of(order).model_copy(update=own), written=True)


def _require_norms(reference: ModelReference, norms: Sequence[str], engine: Engine) -> None:
    for norm in norms:
        if norm in engine.refused:
            raise UnsupportedError(f"{engine.name} cannot run {reference}: {engine.refused[norm]}")


def _given(reference: ModelReference, order: Order, engine: Engine, library: Library) -> Source:
    path = model_file(reference.name)
    try:
        contents = contents_of(path, library.type_name)
        facts = facts_of(contents.header)
    except ValueError as error:
        raise UnsupportedError(
            f"{reference} is not a GGUF file that can be run here: {error}; name another file."
        ) from error
    _require_norms(reference, norms_of(contents.header), engine)
    weights = weights_of_file(
        path,
        hash_of(path, order.folder),
        size=contents.file_bytes,
        parameters=contents.parameters,
        quantized=contents.quantized,
    )
    elements: Counter[str] = Counter()
    for each in contents.header.tensors:
        elements[contents.names[each.type]] += each.elements
    matrices = {contents.names[each.type] for each in contents.header.tensors if len(each.shape) > 1}
    kind = "F32" if matrices == {"F32"} else elements.most_common(1)[0][0]
    return Source(path, facts, contents, kind, weights, written=False)


_VOCABULARY = "tokenizer.ggml.model"
_CACHE_DTYPES = {"F32": "float32", "F16": "float16", "Q8_0": "q8_0", "Q4_0": "q4_0"}


class GgufModel:
    """The weights of a GGUF file. `vocabulary` counts the tokens that it has logits of."""

    def __init__(self, library: Library, path: Path, vocabulary: int) -> None:
        """Raises RuntimeError with the library's reason when it cannot load the file."""
        self.library, self.handle, self.vocabulary = library, library.load(path), vocabulary

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

        They lie in the library's memory and are valid until the next call. Raises OptiGPUError when a token is none of
        the vocabulary.
        """
        count = tokens.shape[1]
        known = self._batches.get(count)
        if known is None:
            arrays = Batch(self.rows, count)
            known = self._batches[count] = (arrays, self._library.batch(arrays))
        arrays, batch = known
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


def prepared(order: Order, engine: Engine, progress: Callable[[str], None]) -> SteppedRuntime:
    """Writes the GGUF file if it is not there, and loads it.

    Raises UnsupportedError for a model or a stack that the engine cannot run, OptiGPUError when writing fails.
    """
    library = engine.open()
    source = source_of(order, engine, library, progress)
    asked = asked_of(order.stack, source.type, order.threads, engine.exact)
    progress("loading")
    model = _loaded(library, source)
    # Weights of 8 bits and fewer meet activations that are rounded to int8.
    products = () if source.type in FLOATS else ("int8",)
    return SteppedRuntime(
        order,
        _notes(engine, library, source, asked),
        engine=library.title,
        facts=source.facts,
        steps=lambda rows, length: Context(model, rows, length, asked),
        weights=source.weights,
        footprint=Footprint(source.facts, *source.contents.read_bytes, products),
    )


def _notes(engine: Engine, library: Library, source: Source, asked: Asked) -> Notes:
    contents = source.contents
    keys, values = asked.keys or "F16", asked.values or "F16"
    dtypes = dict.fromkeys((_CACHE_DTYPES[keys], _CACHE_DTYPES[values]))
    reasons = unknown_kernels(f"{library.title} does not say which kernels of attention run.")
    widths = cache_widths(contents.header, source.facts)
    if widths is None:
        reasons["kv_cache_bytes_per_token"] = "The file does not say what its layers keep of a token."
    notes = Notes()
    notes.record(
        # The floats that matrices are stored in or are widened to.
        dtype={"F16": "float16", "BF16": "bfloat16"}.get(source.type, "float32"),
        kv_cache=library.title,
        kv_cache_dtype=", ".join(dtypes),
        kv_cache_bytes_per_token=_cache_bytes(widths, keys, values) if widths else None,
        decode_loop=library.title,
        decode_operator="llama_decode",
        threads=asked.threads,
        versions={engine.package: version(engine.package)},
        gguf_type=source.type,
        gguf_architecture=contents.header.architecture,
        gguf_file_type=_file_type(contents.header, library),
        gguf_bits_per_weight=round(contents.bits_per_weight, 3),
        gguf_vocabulary=contents.header.values.get(LEFT_OUT, contents.header.values.get(_VOCABULARY)),
        gguf_tensor_types=dict(Counter(contents.names[each.type] for each in contents.header.tensors)),
        reasons=reasons,
        **{f"{engine.name}_flags": library.flags()},
    )
    if asked.attention:
        notes.record(flash_attention=asked.attention == "fused")
    if asked.together:
        notes.record(prompt_tokens_together=asked.together)
    return notes


def _cache_bytes(widths: tuple[int, int], keys: CacheType, values: CacheType) -> int:
    """Of one token, by how many numbers of keys and of values are kept of it."""
    blocks = zip(widths, (GGUF_BLOCKS[keys], GGUF_BLOCKS[values]), strict=True)
    return sum(width // block * size for width, (block, size) in blocks)


def _file_type(header: Header, library: Library) -> str | None:
    """What the file calls its type, which says less than its tensors; None for a file that does not say."""
    number = header.values.get("general.file_type")
    return library.file_types().get(number, f"type {number}") if isinstance(number, int) else None


def _loaded(library: Library, source: Source) -> GgufModel:
    try:
        with whole(source.path, library.title) if source.written else nullcontext():
            return GgufModel(library, source.path, source.facts.vocabulary)
    except RuntimeError as error:
        if source.written:
            raise
        raise UnsupportedError(
            f"{library.title} cannot load {source.path.name}: {error}; name another file."
        ) from error
