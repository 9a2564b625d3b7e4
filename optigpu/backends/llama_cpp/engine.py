"""What tells llama.cpp and its fork apart for the runtime: names, the library, and where files are written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optigpu.backends.base import Order
from optigpu.backends.converted import Converter, model_arguments
from optigpu.backends.llama_cpp import convert
from optigpu.backends.llama_cpp.convert import IMPORTANCE
from optigpu.backends.llama_cpp.gguf_facts import NEED_IMPORTANCE, WRITTEN, ExactCaches, FileType, Form
from optigpu.backends.llama_cpp.library import Library

WRITERS = ("convert", "gguf_facts", "gguf_families", "gguf_tensors", "gguf_tokenizer")
"""Modules that decide what is written of a model."""
_FOLDER = Path(__file__).parent


def sources(*names: str) -> tuple[Path, ...]:
    """Modules of this folder."""
    return tuple(_FOLDER / f"{name}.py" for name in (*WRITERS, *names))


def converter(
    *libraries: str, program: str = convert.__name__, suffix: str = ".gguf", sources: tuple[Path, ...]
) -> Converter:
    """All of them keep what they write in one folder, so that one bound holds for all."""
    return Converter("gguf", program, suffix, sources, ("torch", "transformers", *libraries))


PLAIN = converter("gguf", sources=sources())
"""Writes F32 and F16, which both engines read."""
MATTERS = converter("gguf", suffix=".npz", sources=sources())
"""Writes how much each input of the matrices matters."""


@dataclass(frozen=True)
class Engine:
    """`name` is the backend's, `package` that of its bindings. `open` loads the library; `quantizer` writes its types.

    `refused` has the reason for models with a norm that it cannot run, by the key of its epsilon in a file; `exact` are
    the caches that it has for float32.
    """

    name: str
    package: str
    open: Callable[[], Library]
    quantizer: Converter
    refused: dict[str, str]
    exact: ExactCaches


def _llama_cpp() -> Library:
    from optigpu.backends.llama_cpp.native import LlamaCpp  # imports llama.cpp

    return LlamaCpp()


LLAMA_CPP = Engine(
    name="llama_cpp",
    package="llama-cpp-python",
    open=_llama_cpp,
    quantizer=converter("gguf", "llama-cpp-python", sources=sources("library", "native")),
    refused={},
    exact=ExactCaches(),
)


def gguf_of(order: Order, engine: Engine, form: Form, progress: Callable[[str], None]) -> Path:
    """The GGUF file of an order's model; other types than F32 are quantized from the file of F16, written before them.

    Raises UnsupportedError for a model that cannot be written or quantized, OptiGPUError when writing fails.
    """
    if form.type in WRITTEN:
        return _written(order, form.type, progress)
    kept = engine.quantizer.kept(order, form.name)
    arguments = [] if kept else _quantizing(order, form, progress)
    return engine.quantizer.made(order, form.name, arguments, progress, "quantizing the GGUF file")


def _quantizing(order: Order, form: Form, progress: Callable[[str], None]) -> list[str]:
    """The arguments of the program that quantizes, whose inputs are written first."""
    plain = _written(order, "F16", progress)
    arguments = ["--plain", str(plain), "--form", form.type, "--threads", str(order.threads)]
    if form.everywhere:
        arguments.append("--everywhere")
    if form.type in NEED_IMPORTANCE:
        doing = "finding out which inputs of the matrices matter"
        asked = (*model_arguments(order), "--type", IMPORTANCE)
        matters = MATTERS.made(order, IMPORTANCE, asked, progress, doing)
        arguments += ["--importance", str(matters)]
    return arguments


def _written(order: Order, kind: FileType, progress: Callable[[str], None]) -> Path:
    asked = (*model_arguments(order), "--type", kind)
    return PLAIN.made(order, kind, asked, progress, "writing the GGUF file")
