"""A GGUF file in llama.cpp or its fork, through the C interface that they share."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of, whole
from optigpu.backends.engine import weights_of_file
from optigpu.backends.llama_cpp.engine import Engine, gguf_of
from optigpu.backends.llama_cpp.file_types import FLOATS, Asked, asked_of, form_of
from optigpu.backends.llama_cpp.gguf_families import family_of_architecture, written_family
from optigpu.backends.llama_cpp.gguf_header import Header, read_header
from optigpu.backends.llama_cpp.library import Batch, Library
from optigpu.backends.runtime import Ids, Logits
from optigpu.backends.stepped import SteppedRuntime
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import Footprint, ModelFacts
from optigpu.models.described import decoder_facts
from optigpu.models.held import GGUF, model_file
from optigpu.models.loading.weights import hash_of
from optigpu.models.reference import ModelReference
from optigpu.ops.layouts import GGUF_BLOCKS
from optigpu.techniques.base import Notes
from optigpu.vocabulary import OptiGPUError, OutOfMemoryError, UnsupportedError

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_UP, _GATE = "blk.0.ffn_up.weight", "blk.0.ffn_gate.weight"
NOT_WEIGHTS = ("rope_freqs.weight",)
"""Tensors that follow from the configuration and that transformers does not count as parameters."""


@dataclass(frozen=True)
class Contents:
    """The header of a GGUF file, the names of its tensors' types by number, and the file's own size in bytes."""

    header: Header
    names: dict[int, str]
    file_bytes: int

    @property
    def parameters(self) -> int:
        """How many weights there are; a tied head is stored once."""
        return sum(each.elements for each in self.header.tensors if each.name not in NOT_WEIGHTS)

    @property
    def quantized(self) -> float | None:
        """The share of the weights that have fewer than 16 bits; None if none has."""
        packed = sum(each.elements for each in self.header.tensors if self.names[each.type] not in FLOATS)
        return packed / self.parameters if packed else None

    @property
    def read_bytes(self) -> tuple[int, int]:
        """What every decode step reads wholly, and what one token reads of the tables that are only looked up.

        A tied embedding is the head too, and so is read wholly.
        """
        tensors = self.header.tensors
        untied = any(each.name == _HEAD for each in tensors)
        tables = ["position_embd.weight", *([_EMBEDDING] if untied else [])]
        streamed = sum(each.bytes for each in tensors if each.name not in tables)
        return streamed, sum(each.bytes // each.shape[-1] for each in tensors if each.name in tables)


def contents_of(path: Path, type_name: Callable[[int], str]) -> Contents:
    """Reads a GGUF file's table of tensors; `type_name` is the engine's name of a type's number.

    Raises ValueError for a file that is none.
    """
    header = read_header(path)
    names = {number: type_name(number).upper() for number in {tensor.type for tensor in header.tensors}}
    return Contents(header, names, path.stat().st_size)


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
    _require_runnable(reference, facts.family, engine)
    path = gguf_of(order, engine, form, progress)
    with whole(path, library.title):
        contents = contents_of(path, library.type_name)
    figures = {"parameters": contents.parameters, "quantized": contents.quantized}
    own = {"bytes": contents.file_bytes, **figures}
    return Source(path, facts, contents, form.type, weights_of(order).model_copy(update=own), written=True)


def _require_runnable(reference: ModelReference, family: str, engine: Engine) -> None:
    """Raises UnsupportedError for a family that is not written as GGUF, and one that the engine refuses."""
    try:
        reason = engine.refused.get(written_family(family).decoder.norm_kind)
    except UnsupportedError as error:
        raise UnsupportedError(f"{engine.name} cannot run {reference}: {error}") from error
    if reason:
        raise UnsupportedError(f"{engine.name} cannot run {reference}: {reason}")


def _given(reference: ModelReference, order: Order, engine: Engine, library: Library) -> Source:
    path = model_file(reference.name)
    try:
        contents = contents_of(path, library.type_name)
        facts = facts_of(contents.header)
    except ValueError as error:
        raise UnsupportedError(
            f"{reference} is not a GGUF file that can be run here: {error}; name another file."
        ) from error
    _require_runnable(reference, facts.family, engine)
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


def facts_of(header: Header) -> ModelFacts:
    """Raises ValueError for another architecture, and for a file that leaves out what is asked for."""
    family = family_of_architecture(header.architecture)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if _EMBEDDING not in shapes:
        raise ValueError(f"it has no tensor {_EMBEDDING}")
    heads, width = header.number("attention.head_count"), header.number("embedding_length")
    return ModelFacts(
        family=family,
        hidden_size=width,
        layers=header.number("block_count"),
        heads=heads,
        kv_heads=header.number("attention.head_count_kv", heads),
        vocabulary=shapes[_EMBEDDING][-1],
        context=header.number("context_length"),
        tied_head=_HEAD not in shapes,
        head_size=header.number("attention.key_length", width // heads),
        inner_size=shapes[_UP][-1] if _UP in shapes else None,
        gated_mlp=_GATE in shapes,
        embedding_size=shapes[_EMBEDDING][0],
    )


_CACHE_DTYPES = {"F32": "float32", "F16": "float16", "Q8_0": "q8_0", "Q4_0": "q4_0"}


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
    width = source.facts.layers * source.facts.kv_heads * source.facts.head_size
    (key_block, key_bytes), (value_block, value_bytes) = GGUF_BLOCKS[keys], GGUF_BLOCKS[values]
    dtypes = dict.fromkeys((_CACHE_DTYPES[keys], _CACHE_DTYPES[values]))
    notes = Notes()
    notes.record(
        # The floats that matrices are stored in or are widened to.
        dtype={"F16": "float16", "BF16": "bfloat16"}.get(source.type, "float32"),
        kv_cache=library.title,
        kv_cache_dtype=", ".join(dtypes),
        kv_cache_bytes_per_token=width // key_block * key_bytes + width // value_block * value_bytes,
        decode_loop=library.title,
        decode_operator="llama_decode",
        threads=asked.threads,
        versions={engine.package: version(engine.package)},
        gguf_type=source.type,
        gguf_tensor_types=dict(Counter(contents.names[each.type] for each in contents.header.tensors)),
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
