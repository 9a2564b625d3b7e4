"""The llama_cpp backend: models as GGUF files in llama.cpp, through the package llama-cpp-python.

Without the technique `gguf` a variant is the baseline: weights, keys and values in float32. Only `start` and
`prepare` import llama.cpp.
"""

import os
from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.models.families import FAMILIES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, OutOfMemoryError, UnsupportedError
from optigpu.workloads.base import Workload

PACKAGES = ("llama-cpp-python", "gguf")
INSTALL = 'pip install -e ".[llama]"'
WORKLOADS = ("generate", "quality")
REFUSED = (
    "llama_cpp takes the most likely tokens after random ones here; leave prompt, temperature and top_p out, or ask "
    "for the backend torch."
)
_TITLES = " and ".join(family.title for family in FAMILIES.values() if family.gguf)


class LlamaCppBackend:
    """Decodes on a CPU, models of the families that a GGUF file is written of."""

    name: ClassVar[str] = "llama_cpp"
    summary: ClassVar[str] = f"{_TITLES} models as GGUF files in llama.cpp, on a CPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """The packages of the extra `llama` that are not installed."""
        absent = [package for package in PACKAGES if package not in environment.software]
        if not absent:
            return None
        verb = "is" if len(absent) == 1 else "are"
        return f"{' and '.join(absent)} {verb} not installed; install with: {INSTALL}"

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation and the scoring of text."""
        if workload.kind in WORKLOADS:
            return REFUSED if workload.is_sampled or workload.has_text else None
        return f"llama_cpp does not run the workload {workload.kind}; it runs {', '.join(WORKLOADS)}."

    def start(self, *, model: bool) -> None:
        """Imports llama.cpp and what reads models to be converted."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Writes the model's GGUF file if it is not kept already, and loads it."""
        from optigpu.backends.llama_cpp.runtime import LlamaCppRuntime

        return LlamaCppRuntime(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """llama.cpp offers no operators of its own to measure with."""
        raise UnsupportedError("llama.cpp has no operators that the machine's peaks could be measured with.")

    def use_threads(self, count: int) -> None:
        """For OpenMP, which reads the variable when llama.cpp is loaded; a context is told its threads as well."""
        os.environ["OMP_NUM_THREADS"] = str(count)

    def is_out_of_memory(self, error: Exception) -> bool:
        """llama.cpp returns no context, which the runtime raises as this."""
        return isinstance(error, OutOfMemoryError)
