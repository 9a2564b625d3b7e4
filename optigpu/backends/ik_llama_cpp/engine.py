"""ik_llama.cpp as the runtime of GGUF files asks for it."""

from pathlib import Path

from optigpu.backends.ik_llama_cpp import convert
from optigpu.backends.llama_cpp.engine import Engine, converter, sources
from optigpu.backends.llama_cpp.file_types import ExactCaches
from optigpu.backends.llama_cpp.gguf_families import LAYER_NORM
from optigpu.backends.llama_cpp.library import Library


def _open() -> Library:
    from optigpu.backends.ik_llama_cpp.native import IkLlamaCpp  # imports ik_llama.cpp

    return IkLlamaCpp()


IK_LLAMA_CPP = Engine(
    name="ik_llama_cpp",
    package="ik-llama-cpp-python",
    open=_open,
    quantizer=converter(
        "gguf",
        "ik-llama-cpp-python",
        program=convert.__name__,
        sources=(
            *sources("library"),
            *(Path(__file__).with_name(name) for name in ("convert.py", "native.py", "structures.py")),
        ),
    ),
    refused={
        LAYER_NORM: "ik_llama.cpp ends on an assertion in a LayerNorm (GPT-2's), and would end the process with it; "
        "ask for the backend llama_cpp, or for a model with RMSNorm, such as a Llama."
    },
    # Flash attention ends on an assertion with keys or values of float32, and values of float32 need it.
    exact=ExactCaches(plain=("F32", "F16"), fused=("F16", "F16")),
)
