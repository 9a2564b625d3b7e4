"""The backends llama_cpp and ik_llama_cpp: models as GGUF files in llama.cpp, and in a fork with types of its own.

Without the technique `gguf` a variant is the baseline: weights, keys and values in float32. The fork runs in an
environment of its own (optigpu/engines), through the package ik-llama-cpp-python. Only `start` and `prepare` import
the libraries.
"""

import os
from collections.abc import Callable
from typing import get_args

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineBackend
from optigpu.backends.llama_cpp.gguf_facts import NEED_IMPORTANCE
from optigpu.backends.runtime import Runtime
from optigpu.techniques.base import IkLlamaCppType, Technique, engine_options
from optigpu.workloads.base import Workload


class LlamaCppBackend(EngineBackend):
    """Decodes on a CPU: GGUF files that llama.cpp loads, and models of the families that such a file is written of."""

    name = "llama_cpp"
    summary = "GGUF files, and models that are written as one, in llama.cpp, on a CPU"
    packages = ("llama-cpp-python", "gguf")
    install = 'pip install -e ".[llama]"'
    workloads = ("generate", "quality")
    modules = (".runtime", ".native")

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """As other engines, and with the types of files that it has."""
        if technique is not None:
            return self.refused_type(engine_options((technique,)).weights)
        return super().supports(workload, technique)

    def refused_type(self, name: str) -> str | None:
        """Why files of that type cannot be run, or None."""
        if name in get_args(IkLlamaCppType):
            return f"llama.cpp has no type {name}; ask for the backend ik_llama_cpp, or for another type."
        return None

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the model's GGUF file if it is not kept already, and loads it."""
        from optigpu.backends.llama_cpp.engine import LLAMA_CPP
        from optigpu.backends.llama_cpp.runtime import prepared

        return prepared(order, LLAMA_CPP, progress)

    def use_threads(self, count: int) -> None:
        """For OpenMP, which reads the variable when llama.cpp is loaded; a context is told its threads as well."""
        os.environ["OMP_NUM_THREADS"] = str(count)


NOT_THERE = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0")
"""llama.cpp's types that this fork does not write, or writes under another name."""


class IkLlamaCppBackend(LlamaCppBackend):
    """Decodes on a CPU what llama_cpp does, but for models with LayerNorm."""

    name = "ik_llama_cpp"
    summary = "GGUF files, and models that are written as one, in ik_llama.cpp, on a CPU; no LayerNorm"
    modules = (".ik_native", ".runtime")

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
        from optigpu.backends.llama_cpp.engine import IK_LLAMA_CPP
        from optigpu.backends.llama_cpp.runtime import prepared

        return prepared(order, IK_LLAMA_CPP, progress)
