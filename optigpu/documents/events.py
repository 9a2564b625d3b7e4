"""Events of a running job: `run` passes them to its listener, the store keeps them, the service streams them.

Where a job's time went, as spans. And what a pilot and the service say to each other by HTTP about a job: each call but
the claim names the claim's fencing number.
"""

import base64
import binascii
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from optigpu.documents.result import Attribution, Outcome, Rough
from optigpu.documents.views import ProgressView
from optigpu.vocabulary import FailureKind, Frozen, JobState, Role


class PlannedVariant(Frozen):
    """A variant as the plan lists it."""

    index: int
    role: Role
    label: str


class Planned(Frozen):
    """The first event: which variants the job will measure."""

    kind: Literal["planned"] = "planned"
    variants: tuple[PlannedVariant, ...]


class Waiting(Frozen):
    """The job waits for other processes to rest before its first process starts, for at most `up_to_s` seconds."""

    kind: Literal["waiting"] = "waiting"
    doing: str
    up_to_s: float


class Estimated(Frozen):
    """How long the job will take, before it starts; again where others are at work, and when replicates are left out
    because time is short. `seconds` is for what is still to be measured, `replicates` counts each variant's processes;
    `sentence` says so."""

    kind: Literal["estimated"] = "estimated"
    seconds: float
    limit_s: float
    replicates: int
    sentence: str


class VariantStarted(Frozen):
    """A variant's first process starts."""

    kind: Literal["variant_started"] = "variant_started"
    index: int


class Progressed(Frozen):
    """The progress of the running variant, or `for_all` of them. `fraction` is the share of the whole job that is done,
    in 0..1; `remaining_s` a prediction, null until it is known."""

    kind: Literal["progressed"] = "progressed"
    index: int
    replicate: int
    doing: str
    fraction: float = Field(ge=0, le=1)
    remaining_s: float | None = None
    for_all: bool = False


class RoughlyMeasured(Frozen):
    """What the first requests of a variant show; each such event replaces the variant's earlier one."""

    kind: Literal["rough"] = "rough"
    index: int
    rough: Rough


class Printed(Frozen):
    """A process of a variant has ended, and has printed something: `text` is the end of it. It is kept for an operator
    and never streamed, since a library may print whatever it likes."""

    kind: Literal["printed"] = "printed"
    index: int
    text: str


class VariantFinished(Frozen):
    """A variant ended, with its result or the reason why there is none."""

    kind: Literal["variant_finished"] = "variant_finished"
    outcome: Outcome


class Finished(Frozen):
    """The last event of a run: the gain of each technique, from what was measured."""

    kind: Literal["finished"] = "finished"
    attribution: Attribution


Noted = Planned | Estimated | Waiting | VariantStarted | RoughlyMeasured | Printed
"""Events that are stored by themselves. The others are more than an event: progress, an outcome, the job's end."""
Event = Noted | Progressed | VariantFinished | Finished


def as_document(event: Event) -> dict[str, Any]:
    """The event as plain JSON; raw samples and artifacts are left out, because they are stored apart."""
    return event.model_dump(mode="json", exclude={"outcome": {"samples", "artifacts"}})


class Span(Frozen):
    """What a replicate of a variant did, or the job as a whole (`index` null), and for how long.

    It began `began_s` seconds after the job's request was read. `seconds` are of the wall clock; what was done in turns
    with others counts its own turns alone. `cpu_s` are the CPU seconds of the job's processes meanwhile, without
    those of programs that they started (compilers); 0 where the system does not count them.
    """

    index: int | None
    replicate: int
    doing: str
    began_s: float
    seconds: float
    cpu_s: float


Fencing = Annotated[int, Field(ge=1, description="The number that the claim returned.")]


class PilotBeat(Frozen):
    """A sign of life, with the newest progress."""

    fencing: Fencing
    progress: ProgressView | None = None


class PilotBeatAnswer(Frozen):
    """Whether somebody asked for the job to be cancelled."""

    cancel_requested: bool


class PilotEvent(Frozen):
    """Something that happened, besides progress and the end of a variant."""

    fencing: Fencing
    event: Annotated[Noted, Field(discriminator="kind")]


class PilotFile(Frozen):
    """A file that a meter left, compressed by zlib and then encoded by base64; or the reason why there is none."""

    name: str = Field(max_length=100)
    media_type: str = Field(max_length=100)
    size_bytes: int | None = Field(None, ge=0)
    sha256: str | None = None
    reason: str | None = None
    data: str | None = None

    @field_validator("data")
    @classmethod
    def _is_base64(cls, data: str | None) -> str | None:
        try:
            base64.b64decode(data or "", validate=True)
        except binascii.Error as error:
            raise ValueError("this is not base64") from error
        return data

    @property
    def content(self) -> bytes | None:
        """The compressed bytes."""
        return None if self.data is None else base64.b64decode(self.data)


class PilotOutcome(Frozen):
    """How a variant ended, with its raw samples and files."""

    fencing: Fencing
    outcome: Outcome
    files: tuple[PilotFile, ...] = Field((), max_length=64)


class Finish(Frozen):
    """The job has ended."""

    kind: Literal["finish"] = "finish"
    state: JobState
    reason: str | None = None
    attribution: Attribution | None = None


class Fail(Frozen):
    """This attempt failed; what it failed of decides whether another follows."""

    kind: Literal["fail"] = "fail"
    failure: FailureKind
    reason: str


class Release(Frozen):
    """The job is handed back."""

    kind: Literal["release"] = "release"


class PilotEnd(Frozen):
    """How the pilot's attempt ended."""

    fencing: Fencing
    end: Annotated[Finish | Fail | Release, Field(discriminator="kind")]
