"""What a pilot and the service say to each other by HTTP. Each call but the claim names the claim's fencing number."""

import base64
import binascii
from typing import Annotated, Literal

from pydantic import Field, field_validator

from optigpu.documents.events import Noted
from optigpu.documents.result import Attribution, Outcome
from optigpu.documents.views import ProgressView
from optigpu.vocabulary import FailureKind, Frozen, JobState

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
