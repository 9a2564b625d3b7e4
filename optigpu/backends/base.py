"""What a backend is: an engine that executes variants, what it can run, and how it is made ready.

This module and each backend's `__init__` are imported everywhere, so an engine's libraries are imported by `prepare`,
`peaks` and `use_threads` alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from optigpu.backends.runtime import Runtime
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.base import Workload


@dataclass(frozen=True)
class Order:
    """What a backend is asked to prepare: one variant in one process."""

    model: str | None  # the reference, such as "preset:gpt2"; None for a workload without a model
    stack: tuple[Technique, ...]  # resolved, in the order of the phases
    workload: Workload  # a single one: all lists of shapes have one item
    device: DeviceKind
    seed: int
    threads: int  # CPU threads that the engine may use
    folder: Path  # the job's scratch folder, shared by its processes
    environment: Environment


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

    def prepare(self, order: Order, progress: Callable[[str], None]) -> Runtime:
        """Loads the model and applies the stack; `progress` is told what it is busy with.

        The result is a DecodingRuntime, PassRuntime or OperatorRuntime, as the workload's task says. Raises
        UnsupportedError when this machine or this model cannot do it.
        """

    def peaks(self, device: DeviceKind, threads: int) -> Peaks:
        """How fast the machine reads, copies and multiplies through this engine.

        Raises UnsupportedError if there is no such device, or no such operator.
        """

    def use_threads(self, count: int) -> None:
        """Limits the engine to so many CPU threads; called before anything of it is used."""

    def is_out_of_memory(self, error: Exception) -> bool:
        """Whether the engine says with `error` that memory ran out; must not import the engine."""
