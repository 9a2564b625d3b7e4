"""What every launcher offers, and the errors of schedulers:

SchedulerError: it refused, so that nothing was done.
  SchedulerAwayError: it is not there, did not answer in time, or answered nonsense: what it did is unknown.
"""

from collections.abc import Collection, Mapping
from typing import Protocol

from optigpu.clusters import Task
from optigpu.documents.views import LaunchState
from optigpu.vocabulary import Frozen, OptiGPUError


class SchedulerError(OptiGPUError):
    """The scheduler refused."""


class SchedulerAwayError(SchedulerError):
    """The scheduler cannot be asked; the same call may succeed later."""


class Seen(Frozen):
    """What a scheduler says of a launch. `reference` is its own id of it; `reason` is why it has ended."""

    reference: str
    state: LaunchState
    reason: str | None = None


class Access(Frozen):
    """What a pilot is handed: the service's address, and the token of its job."""

    url: str
    token: str


class Launcher(Protocol):
    """The calls to one scheduler. Each ends in bounded time and raises SchedulerError."""

    def submit(self, task: Task, access: Access) -> str:
        """Hands the job over; returns the scheduler's id of it."""
        ...

    def status(self, references: Collection[str]) -> Mapping[str, Seen]:
        """Every launch that the scheduler knows, by its name; one of `references` that it has forgotten is left out."""
        ...

    def cancel(self, reference: str) -> None:
        """Ends it, whether it waits or runs. One that has ended already stays as it is."""
        ...
