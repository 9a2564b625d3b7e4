"""GGUF files: the kinds of weights that they are written with here, and what a file's own numbers say of its model.

The numbers are read whatever the architecture is. What a stack asks of a context is read here as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from optigpu.backends.llama_cpp.gguf_families import family_of_architecture
from optigpu.documents.facts import AttentionWork, ModelFacts, TokenWork
from optigpu.models.gguf_header import EMBEDDING, Header, Placed, read_header
from optigpu.techniques.base import GgufType, Technique, engine_options
from optigpu.vocabulary import UnsupportedError

FileType = Literal["F32", GgufType]
"""The engines' names. A file of few bits keeps vectors in F32, and some matrices in more bits than it says."""
FILE_TYPES: tuple[FileType, ...] = get_args(FileType)
FLOATS: tuple[FileType, ...] = ("F32", "F16", "BF16")
WRITTEN: tuple[FileType, ...] = ("F32", "F16")
"""Those that the project writes itself; all others are quantized from F16."""
NEED_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "Q2_K_S")
"""Types that llama.cpp refuses to write without knowing how much each input of a matrix matters."""
CacheType = Literal["F32", "F16", "Q8_0", "Q4_0"]
PLAIN_VALUES: tuple[CacheType, ...] = ("F32", "F16")
"""What attention reads without flash attention."""


@dataclass(frozen=True)
class Form:
    """How a file is written; `everywhere` gives the embedding and the head the type of the other matrices."""

    type: FileType
    everywhere: bool = False

    @property
    def name(self) -> str:
        """Tells the files of one model apart."""
        return f"{self.type}-everywhere" if self.everywhere else self.type


@dataclass(frozen=True)
class Asked:
    """What a context is asked for; None is the engine's own default.

    `keys` and `values` are what the cache keeps them in, `attention` "fused" is flash attention, and `together` is how
    many tokens of a prompt go through the model at once.
    """

    threads: int
    keys: CacheType | None = None
    values: CacheType | None = None
    attention: Literal["plain", "fused"] | None = None
    together: int | None = None


def form_of(stack: Sequence[Technique]) -> Form:
    """What a stack asks for; F32 without a technique that names a type."""
    options = engine_options(stack)
    name = {"float32": "F32"}.get(options.weights, options.weights)
    (kind,) = (each for each in FILE_TYPES if each == name)
    return Form(kind, bool(options.everywhere))


@dataclass(frozen=True)
class ExactCaches:
    """The most exact keys and values that an engine's attention reads, by the kind of attention."""

    plain: tuple[CacheType, CacheType] = ("F32", "F32")
    fused: tuple[CacheType, CacheType] = ("F32", "F32")


def asked_of(stack: Sequence[Technique], kind: str, threads: int, exact: ExactCaches) -> Asked:
    """What a stack asks of a context: with weights in F32 the cache and the attention are exact as well.

    Raises UnsupportedError for values of few bits beside the attention that cannot read them.
    """
    options = engine_options(stack)
    keys, values = _cache(options.cache), _cache(options.cache_values or options.cache)
    attention = options.attention
    if values and values not in PLAIN_VALUES:
        if attention == "plain":
            raise UnsupportedError(
                f"Only flash attention reads values in {values}; leave llama_flash_attention out, or give it "
                "enabled true."
            )
        attention = "fused"
    if kind == "F32":
        attention = attention or "plain"
        usual = exact.fused if attention == "fused" else exact.plain
        keys, values = keys or usual[0], values or usual[1]
    return Asked(threads, keys, values, attention, options.together)


def _cache(name: str | None) -> CacheType | None:
    return next((each for each in get_args(CacheType) if each == name), None)


_HEAD = "output.weight"
_LOOKED_UP = ("position_embd.weight", "per_layer_token_embd.weight")
_EXPERTS = "_exps."
"""In the names of matrices of which a token reads those of the experts that are chosen for it."""
_LOOKING_AHEAD = ".nextn."
"""In those of blocks that guess further tokens, and that a pass leaves out."""
NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that follow from the configuration and that transformers does not count as parameters."""
_NOT_KEYS = (".ssm_", ".time_mix_", ".shortconv.", ".attn_kv_a_mqa.", ".attn_kv_b.")
"""Parts of the names of tensors of blocks that keep a state, or keys and values in a form of their own."""
LEFT_OUT = "optigpu.tokenizer_left_out"
"""The key under which a file that is written here says why it has no vocabulary."""
_ENCODED = ("enc.", "dec.")


@dataclass(frozen=True)
class Contents:
    """The header of a GGUF file, the names of its tensors' types by number, and the file's own size in bytes."""

    header: Header
    names: dict[int, str]
    file_bytes: int

    @property
    def weights(self) -> tuple[Placed, ...]:
        """The tensors that are a model's parameters."""
        return tuple(each for each in self.header.tensors if each.name not in NOT_WEIGHTS)

    @property
    def parameters(self) -> int:
        """How many weights there are; a tied head is stored once."""
        return sum(each.elements for each in self.weights)

    @property
    def bits_per_weight(self) -> float:
        """The mean over all weights, as they are stored."""
        return 8 * sum(each.bytes for each in self.weights) / self.parameters

    @property
    def quantized(self) -> float | None:
        """The share of the weights that have fewer than 16 bits; None if none has."""
        packed = sum(each.elements for each in self.header.tensors if self.names[each.type] not in FLOATS)
        return packed / self.parameters if packed else None

    @property
    def read_bytes(self) -> tuple[int, int]:
        """What every decode step reads at least, and what one token reads of the tables that are only looked up.

        A tied embedding is the head too, and so is read wholly. Of experts those of one token are read.
        """
        tensors = self.header.tensors
        untied = any(each.name == _HEAD for each in tensors)
        tables = [*_LOOKED_UP, *([EMBEDDING] if untied else [])]
        streamed = sum(
            each.bytes * _share_of(each, self.header) for each in tensors if each.name not in tables
        )
        return int(streamed), sum(each.bytes // each.shape[-1] for each in tensors if each.name in tables)


def contents_of(path: Path, type_name: Callable[[int], str]) -> Contents:
    """Reads a GGUF file's table of tensors; `type_name` is the engine's name of a type's number.

    Raises ValueError for a file that is none, or a part of one.
    """
    header = read_header(path)
    parts = header.values.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ValueError(f"it is one of {parts} parts, which llama-gguf-split --merge makes one file of")
    names = {number: type_name(number).upper() for number in {tensor.type for tensor in header.tensors}}
    return Contents(header, names, path.stat().st_size)


def facts_of(header: Header) -> ModelFacts:
    """Raises ValueError for a model that does not go on with a text, and a file that leaves out what is asked for."""
    embedding = header.embedding.shape
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if any(name.startswith(_ENCODED) for name in shapes):
        raise ValueError("its model is an encoder-decoder, and only decoders are run")
    if header.values.get(f"{header.architecture}.attention.causal") is False:
        raise ValueError("its model reads a text from both sides, and generates none word by word")
    layers, width = header.number("block_count"), header.number("embedding_length")
    heads = _heads(header, "attention.head_count", layers, (0,) * layers)
    kv_heads = _heads(header, "attention.head_count_kv", layers, heads)
    most = max(heads)
    facts = ModelFacts(
        family=family_of_architecture(header.architecture),
        hidden_size=width,
        layers=layers,
        heads=most,
        kv_heads=max(kv_heads),
        vocabulary=embedding[-1],
        context=header.number("context_length"),
        tied_head=_HEAD not in shapes,
        head_size=header.number("attention.key_length", width // most) if most else 0,
        inner_size=None,
        gated_mlp=None,
        embedding_size=embedding[0],
    )
    return replace(facts, work=_work(header, facts, sum(heads)))


def _heads(header: Header, key: str, layers: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Of each layer. Raises ValueError where no layer has any, unless layers keep something else of a text."""
    found = header.by_layer(key, layers, default)
    if not any(found) and not keeps_states(header):
        raise ValueError(f"its {header.architecture}.{key} is 0, which is not positive")
    return found


def _work(header: Header, facts: ModelFacts, heads: int) -> TokenWork | None:
    """By the matrices; None where not every token is multiplied by all of them, or blocks keep something else than keys
    and values. Which layers have the window of a file is in the engine."""
    widths = cache_widths(header, facts)
    if widths is None or any(_LOOKING_AHEAD in each.name for each in header.tensors):
        return None
    head = EMBEDDING if facts.tied_head else _HEAD
    tables = (EMBEDDING, _HEAD, *_LOOKED_UP)
    weights = sum(
        each.elements * _share_of(each, header)
        for each in header.tensors
        if len(each.shape) > 1 and each.name.endswith(".weight") and each.name not in tables
    )
    sizes = facts.head_size + header.number("attention.value_length", facts.head_size)
    window = header.values.get(f"{header.architecture}.attention.sliding_window")
    return TokenWork(
        flops=int(2 * weights),
        head_flops=2 * next(each.elements for each in header.tensors if each.name == head),
        attention=(AttentionWork(None, 2 * heads * sizes, sum(widths)),),
        longest=window if isinstance(window, int) and window else None,
    )


def _share_of(tensor: Placed, header: Header) -> float:
    """How much of a matrix a token is multiplied by."""
    values, architecture = header.values, header.architecture
    used, all_ = (values.get(f"{architecture}.{key}") for key in ("expert_used_count", "expert_count"))
    if _EXPERTS in tensor.name and isinstance(used, int) and isinstance(all_, int) and all_:
        return used / all_
    return 1


def keeps_states(header: Header) -> bool:
    """Whether layers keep something else of a text than keys and values of its tokens."""
    return any(part in each.name for each in header.tensors for part in _NOT_KEYS)


def cache_widths(header: Header, facts: ModelFacts) -> tuple[int, int] | None:
    """How many numbers of keys and of values all layers keep of a token; None where they keep something else."""
    if keeps_states(header) or not facts.heads:
        return None
    kv_heads = sum(header.by_layer("attention.head_count_kv", facts.layers, (facts.heads,) * facts.layers))
    return kv_heads * facts.head_size, kv_heads * header.number("attention.value_length", facts.head_size)


def norms_of(header: Header) -> tuple[str, ...]:
    """The keys of the epsilons of its norms, without the architecture's name."""
    prefix = f"{header.architecture}.attention.layer_norm"
    return tuple(
        key.removeprefix(f"{header.architecture}.") for key in header.values if key.startswith(prefix)
    )
