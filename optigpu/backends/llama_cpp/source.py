"""The GGUF file of an order: one that is written of its model, or one that its reference names; and what it holds."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.backends.converted import weights_of, whole
from optigpu.backends.llama_cpp.engine import Engine, gguf_of
from optigpu.backends.llama_cpp.file_types import form_of
from optigpu.backends.llama_cpp.gguf_families import family_of_architecture, written_family
from optigpu.backends.llama_cpp.gguf_header import Header, Placed, read_header
from optigpu.backends.llama_cpp.library import Library
from optigpu.documents.facts import WeightFacts
from optigpu.documents.shapes import ModelFacts
from optigpu.models.described import decoder_facts
from optigpu.models.held import GGUF, model_file
from optigpu.models.loading.weights import hash_of
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.vocabulary import UnsupportedError

NO_REVISION = "A file has no revision; the weight hash identifies it."
_EMBEDDING, _HEAD, _UP, _GATE = (
    "token_embd.weight",
    "output.weight",
    "blk.0.ffn_up.weight",
    "blk.0.ffn_gate.weight",
)
NOT_WEIGHTS = ("rope_freqs.weight",)
"""Tensors that follow from the configuration and that transformers does not count as parameters."""

_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Contents:
    """The tensors of a GGUF file, the names of their types by number, and the file's own size in bytes."""

    tensors: tuple[Placed, ...]
    names: dict[int, str]
    file_bytes: int

    @property
    def parameters(self) -> int:
        """How many weights there are; a tied head is stored once."""
        return sum(tensor.elements for tensor in self.tensors if tensor.name not in NOT_WEIGHTS)

    @property
    def quantized(self) -> float | None:
        """The share of the weights that have fewer than 16 bits; None if none has."""
        packed = sum(each.elements for each in self.tensors if self.names[each.type] not in _FLOATS)
        return packed / self.parameters if packed else None

    @property
    def types(self) -> dict[str, int]:
        """How many tensors there are of each type."""
        return dict(Counter(self.names[tensor.type] for tensor in self.tensors))

    @property
    def main_type(self) -> str:
        """The type that most of the weights have."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors:
            weights[self.names[tensor.type]] += tensor.elements
        return weights.most_common(1)[0][0]

    @property
    def row_bytes(self) -> int:
        """What one token reads of the tables that are only looked up."""
        return sum(tensor.bytes // tensor.shape[-1] for tensor in self.tensors if self._is_looked_up(tensor))

    @property
    def streamed_bytes(self) -> int:
        """What every decode step reads wholly: all but the tables that are only looked up."""
        return sum(tensor.bytes for tensor in self.tensors if not self._is_looked_up(tensor))

    def _is_looked_up(self, tensor: Placed) -> bool:
        """A tied embedding is the head too, and so is read wholly."""
        untied = any(other.name == "output.weight" for other in self.tensors)
        return tensor.name == "position_embd.weight" or (tensor.name == "token_embd.weight" and untied)


def contents_of(path: Path, type_name: Callable[[int], str]) -> Contents:
    """Reads a GGUF file's table of tensors; `type_name` is the engine's name of a type's number.

    Raises ValueError for a file that is none.
    """
    return described(read_header(path), path, type_name)


def described(header: Header, path: Path, type_name: Callable[[int], str]) -> Contents:
    """The contents of a file whose header was read."""
    numbers = {tensor.type for tensor in header.tensors}
    names = {number: type_name(number).upper() for number in numbers}
    return Contents(header.tensors, names, path.stat().st_size)


@dataclass(frozen=True)
class Source:
    """A file, what it holds, and the type of its matrices. `written` says that it can be written anew."""

    path: Path
    facts: ModelFacts
    contents: Contents
    type: str
    weights: WeightFacts
    written: bool

    @property
    def dtype(self) -> str:
        """The floats that matrices are stored in or are widened to."""
        return {"F16": "float16", "BF16": "bfloat16"}.get(self.type, "float32")


def source_of(order: Order, engine: Engine, library: Library, progress: Callable[[str], None]) -> Source:
    """The file of an order, written if it is not there.

    Raises UnsupportedError for a model that the engine cannot run or that cannot be written, a file that is no GGUF
    file of a known architecture, and a type for a file that has one; OptiGPUError when writing fails.
    """
    reference = parse_reference(str(order.model))
    form = form_of(order.stack)
    if reference.kind == "path" and reference.name.endswith(GGUF):
        if form.type != "F32":
            raise UnsupportedError(f"{reference} has the type that it was written with; leave gguf out.")
        return _given(reference, order, engine, library)
    facts = _facts(reference, engine)
    path = gguf_of(order, engine, form, progress)
    with whole(path, library.title):
        contents = contents_of(path, library.type_name)
    own = {
        "bytes": contents.file_bytes,
        "parameters": contents.parameters,
        "quantized": contents.quantized,
    }
    return Source(path, facts, contents, form.type, weights_of(order).model_copy(update=own), written=True)


def _facts(reference: ModelReference, engine: Engine) -> ModelFacts:
    """Raises UnsupportedError for what is not written as GGUF, or what the engine refuses."""
    facts = decoder_facts(reference)
    try:
        written_family(facts.family)
    except UnsupportedError as error:
        raise UnsupportedError(f"{engine.name} cannot run {reference}: {error}") from error
    _require_runnable(reference, facts.family, engine)
    return facts


def _require_runnable(reference: ModelReference, family: str, engine: Engine) -> None:
    reason = engine.refused.get(written_family(family).decoder.norm_kind)
    if reason:
        raise UnsupportedError(f"{engine.name} cannot run {reference}: {reason}")


def _given(reference: ModelReference, order: Order, engine: Engine, library: Library) -> Source:
    path = model_file(reference.name)
    try:
        header = read_header(path)
        facts = facts_of(header)
        contents = contents_of(path, library.type_name)
    except ValueError as error:
        raise UnsupportedError(
            f"{reference} is not a GGUF file that can be run here: {error}; name another file."
        ) from error
    _require_runnable(reference, facts.family, engine)
    sha256 = hash_of(path, order.folder)
    weights = WeightFacts(
        bytes=contents.file_bytes,
        parameters=contents.parameters,
        quantized=contents.quantized,
        hash=sha256,
        hash_of="files",
        files={path.name: sha256},
        reasons={"revision": NO_REVISION},
    )
    matrices = {contents.names[each.type] for each in header.tensors if len(each.shape) > 1}
    kind = "F32" if matrices == {"F32"} else contents.main_type
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
