"""A GGUF file in llama.cpp or its fork, as what workloads and meters ask of."""

from collections.abc import Callable
from importlib.metadata import version

from optigpu.backends.base import Order
from optigpu.backends.converted import whole
from optigpu.backends.llama_cpp.engine import Engine
from optigpu.backends.llama_cpp.file_types import Asked, asked_of, product_dtypes_of
from optigpu.backends.llama_cpp.library import Library
from optigpu.backends.llama_cpp.model import Context, GgufModel
from optigpu.backends.llama_cpp.source import Source, source_of
from optigpu.backends.stepped import Loaded, SteppedRuntime
from optigpu.documents.shapes import Footprint
from optigpu.ops.layouts import GGUF_BLOCKS, GgufBlock
from optigpu.techniques.base import Notes
from optigpu.vocabulary import UnsupportedError

_CACHE_DTYPES = {"F32": "float32", "F16": "float16", "Q8_0": "q8_0", "Q4_0": "q4_0"}


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
