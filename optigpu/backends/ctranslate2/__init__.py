"""The ctranslate2 backend: models that CTranslate2's own converter writes from transformers models, on a CPU.

Without a technique a variant is the baseline: everything in float32. Only `start` and `prepare` import CTranslate2.
"""

from collections.abc import Callable
from importlib import import_module
from typing import ClassVar

from optigpu.backends.base import Order
from optigpu.backends.refusals import allocation_failed, no_operators, packages_missing, workload_refused
from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload

PACKAGE = "ctranslate2"
INSTALL = 'pip install -e ".[ctranslate2]"'
WORKLOADS = ("generate", "quality")


class Ctranslate2Backend:
    """Decodes on a CPU, models of the families that CTranslate2's converter knows."""

    name: ClassVar[str] = "ctranslate2"
    summary: ClassVar[str] = "decoders that CTranslate2's converter writes, on a CPU"
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU,)

    def missing(self, environment: Environment) -> str | None:
        """CTranslate2, if it is not installed."""
        return packages_missing((PACKAGE,), environment, INSTALL)

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Text generation and the scoring of text."""
        return workload_refused(self.name, workload, WORKLOADS)

    def start(self, *, model: bool) -> None:
        """Imports CTranslate2."""
        import_module(f"{__name__}.runtime")

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Converts the model if it is not kept already, and loads it."""
        from optigpu.backends.ctranslate2.runtime import Ctranslate2Runtime

        return Ctranslate2Runtime(order, progress)

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """CTranslate2 offers no operators of its own to measure with."""
        raise no_operators(self.name)

    def use_threads(self, count: int) -> None:
        """Nothing: a model is told its threads when it is loaded."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """CTranslate2 says it in its own words, or in C++'s."""
        return allocation_failed(error)
