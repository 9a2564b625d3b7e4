"""The llama_cpp backend: models as GGUF files in llama.cpp, through the package llama-cpp-python.

Without the technique `gguf` a variant is the baseline: weights, keys and values in float32. Only `start` and
`prepare` import llama.cpp.
"""

import os
from collections.abc import Callable
from typing import get_args

from optigpu.backends.base import Order
from optigpu.backends.engine import EngineBackend
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
