"""The kinds of weights that a GGUF file is written with here, and what a stack asks of a context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

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
