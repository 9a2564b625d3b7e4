"""The interface of a backend: an engine, what it can run, and how it prepares a variant.

This module and each backend's `__init__` are imported everywhere, so only `start`, `prepare`, `peaks` and `use_threads`
import an engine's libraries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.models.reference import ModelReference, parse_reference
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload


@dataclass(frozen=True)
class Order:
    """The variant that a backend prepares in one process."""

    model: str | None  # the reference, such as "preset:gpt2"; None for a workload without a model
    stack: tuple[Technique, ...]  # resolved, in the order of the phases
    workload: Workload  # a single one: all lists of shapes have one item
    device: DeviceKind
    seed: int
    threads: int  # CPU threads that the engine may use
    folder: Path  # the job's scratch folder, shared by its processes
    environment: Environment
    endpoint: str | None = None  # the server of the backend endpoint, as URL#MODEL
    answer_s: float = 600.0  # how long that server may take for one answer

    @property
    def reference(self) -> ModelReference:
        """The model, parsed. Raises SpecError for a reference that cannot be."""
        return parse_reference(str(self.model))


class Backend(Protocol):
    """One engine. An instance has no state, so that one is enough for every process."""

    name: ClassVar[str]
    summary: ClassVar[str]
    devices: ClassVar[tuple[DeviceKind, ...]]

    def missing(self, environment: Environment) -> str | None:
        """Why the engine cannot run on this machine, with the one command that helps, or None."""

    def supports(self, workload: Workload, technique: Technique | None) -> str | None:
        """Why the engine cannot run this workload (`technique` None) or apply this technique to it, or None.

        Asked when a job is posted; that `Technique.backends` names this backend was checked before.
        """

    def start(self, *, model: bool) -> None:
        """Imports the engine's libraries, with `model` also those that load models. Raises ImportError.

        Without it `prepare` does the same, and its time counts as time to load.
        """

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Loads the model and applies the stack; `progress` is called with what it is doing.

        The result is a DecodingRuntime, PassRuntime or OperatorRuntime, as the workload's task says. Raises
        UnsupportedError when this machine or this model cannot do it.
        """

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """How fast the machine reads, copies and multiplies through this engine. Raises UnsupportedError where not."""

    def use_threads(self, count: int) -> None:
        """Limits the engine to that many CPU threads; called before the engine is used."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether `error` means that memory ran out; must not import the engine."""
