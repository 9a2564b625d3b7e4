"""The ik_llama_cpp backend: GGUF files in ik_llama.cpp, a fork of llama.cpp with types and kernels of its own.

It runs in an environment of its own (optigpu/engines), through the package ik-llama-cpp-python. What it has in common
with llama.cpp is the backend llama_cpp's. Only `start` and `prepare` import it.
"""

from collections.abc import Callable

from optigpu.backends.base import Order
from optigpu.backends.llama_cpp import LlamaCppBackend
from optigpu.backends.llama_cpp.gguf_facts import NEED_IMPORTANCE
from optigpu.backends.runtime import Runtime

NOT_THERE = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
"""llama.cpp's types that this fork does not write, or writes under another name."""


class IkLlamaCppBackend(LlamaCppBackend):
    """Decodes on a CPU what llama_cpp does, but for models with LayerNorm."""

    name = "ik_llama_cpp"
    summary = "GGUF files, and models that are written as one, in ik_llama.cpp, on a CPU; no LayerNorm"
    modules = (".native", "..llama_cpp.runtime")

    def refused_type(self, name: str) -> str | None:
        """The types that are written for llama.cpp alone."""
        if name in NEED_IMPORTANCE:
            return (
                f"The type {name} needs to know how much each input matters, which ik_llama.cpp takes in no form that "
                "C has; ask for the backend llama_cpp, or for another type."
            )
        if name in NOT_THERE:
            return f"ik_llama.cpp has no type {name}; ask for the backend llama_cpp, or for another type."
        return None

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the model's GGUF file if it is not kept already, and loads it."""
        from optigpu.backends.ik_llama_cpp.engine import IK_LLAMA_CPP
        from optigpu.backends.llama_cpp.runtime import prepared

        return prepared(order, IK_LLAMA_CPP, progress)
