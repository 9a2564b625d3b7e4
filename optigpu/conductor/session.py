"""What the measuring processes of one job share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from optigpu.child.messages import Assignment
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.memory_budget import MakeMemoryRule, MemoryBudget
from optigpu.conductor.processes.variables import child_variables, needs_secrets, recorded_variables
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.host_monitor import HostMonitor, nobody
from optigpu.documents.events import Event
from optigpu.documents.result import Environment
from optigpu.hardware import hardware_class, probe
from optigpu.job.spec import JobSpec, Variant
from optigpu.vocabulary import DeviceKind


def environment_for(device: DeviceKind) -> Environment:
    """This machine as a job on `device` uses it: the class of its one device, the variables of its processes."""
    environment = probe()
    return environment.model_copy(
        update={
            "hardware_class": hardware_class(environment, device),
            "variables": recorded_variables(),
        }
    )


@dataclass
class Session:
    """One job on its device.

    To be made before the job's first measuring process starts, so that the monitor takes whatever computes on the GPU
    by then for another's.
    """

    spec: JobSpec
    environment: Environment
    # How many threads each measuring process computes with.
    threads: int
    # The command that starts a measuring process.
    program: tuple[str, ...]
    # The job's locks, which its processes inherit.
    descriptors: tuple[int, ...]
    # The job's scratch directory.
    folder: str
    progress: JobProgress
    on_event: Callable[[Event], None]
    # Whether another job is measured on this host.
    others: Callable[[], bool] = nobody
    # Makes what decides how many processes fit into memory.
    memory_rule: MakeMemoryRule = MemoryBudget
    monitor: HostMonitor = field(init=False)
    _running: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.monitor = HostMonitor(self.spec.device, self.environment, lambda: self._running, self.others)

    def assignment(self, variant: Variant, replicate: int) -> Assignment:
        """The first message to a process that measures this variant."""
        return Assignment(
            variant=variant,
            environment=self.environment,
            measure=self.spec.measure,
            seed=self.spec.seed,
            replicate=replicate,
            folder=self.folder,
            threads=self.threads,
        )

    @contextmanager
    def child(self, variant: Variant) -> Iterator[Child]:
        """A new process that measures this variant. While it lives, the monitor counts it as the job's own."""
        variables = child_variables(self.threads, secrets=needs_secrets(variant))
        with Child(self.program, variables, keep=self.descriptors) as child:
            self._running.add(child.pid)
            try:
                yield child
            finally:
                self._running.discard(child.pid)
