"""The llama_cpp backend: models as GGUF files in llama.cpp, through the package llama-cpp-python.

Without the technique `gguf` a variant is the baseline: weights, keys and values in float32. Only `start` and
`prepare` import llama.cpp.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar, get_args

from optigpu.backends.base import Order
from optigpu.backends.refusals import allocation_failed, no_operators, packages_missing, workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.models.families import FAMILIES
from optigpu.techniques.base import IkLlamaCppType, Technique, engine_options
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

PACKAGES = ("llama-cpp-python", "gguf")
INSTALL = 'pip install -e ".[llama]"'
WORKLOADS = ("generate", "quality")
IK_TYPES: tuple[str, ...] = get_args(IkLlamaCppType)
_TITLES = " and ".join(family.title for family in FAMILIES.values() if family.gguf)


class LlamaCppBackend:
    """Decodes on a CPU, models of the families that a GGUF file is written of, and GGUF files of these."""

    name: ClassVar[str] = "llama_cpp"
    summary: ClassVar[str] = f"{_TITLES} models as GGUF files in llama.cpp, on a CPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """The packages of the extra `llama` that are not installed."""
        return packages_missing(PACKAGES, environment, INSTALL)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation and the scoring of text, with the types of files that llama.cpp has."""
        if technique is not None:
            return self.refused_type(engine_options((technique,)).weights)
        return workload_refused(self.name, workload, WORKLOADS)

    def refused_type(self, name: str) -> str | None:
        """Why files of that type cannot be run, or None."""
        if name in IK_TYPES:
            return f"llama.cpp has no type {name}; ask for the backend ik_llama_cpp, or for another type."
        return None

    def start(self, *, model: bool) -> None:
        """Imports llama.cpp and what runs it."""
        import_module(f"{__name__}.runtime")
        import_module(f"{__name__}.native")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the model's GGUF file if it is not kept already, and loads it."""
        from optigpu.backends.llama_cpp.engine import LLAMA_CPP
        from optigpu.backends.llama_cpp.runtime import prepared

        return prepared(order, LLAMA_CPP, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """It offers no operators of its own to measure with."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """For OpenMP, which reads the variable when llama.cpp is loaded; a context is told its threads as well."""
        os.environ["OMP_NUM_THREADS"] = str(count)

    def is_out_of_memory(self, error: Exception) -> bool:
        """llama.cpp returns no context, which the runtime raises as this."""
        return allocation_failed(error)
