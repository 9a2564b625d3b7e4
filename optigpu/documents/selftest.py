"""What a self-test found: each check with its largest error and the bound that it must keep."""

from enum import StrEnum
from typing import NamedTuple

from pydantic import AwareDatetime

from optigpu.vocabulary import DeviceKind, Frozen

SELFTEST_FORMAT = 1
"""Version of the file; raised when a field changes its name or its meaning, or when a check becomes another one."""


class Subject(StrEnum):
    """What a check is about. `model` is the unmodified model."""

    MODEL = "model"
    KERNEL = "kernel"
    TECHNIQUE = "technique"
    ENGINE = "engine"
    METER = "meter"


class CheckStatus(StrEnum):
    """How a check ended."""

    OK = "ok"
    FAILED = "failed"
    NOT_POSSIBLE = "not possible here"


class Comparison(NamedTuple):
    """The largest error that a check saw and the bound that it must keep, both as a share of `of`. `how` is what the
    check ran: a model, a kernel's backend."""

    error: float
    bound: float
    of: str
    how: str = ""


class SelfCheck(Frozen):
    """One check on one device. `case` tells several checks of one name apart; empty for the only one. `alone` means
    that it has a process of its own, and `backend` whose engine runs it: null is torch."""

    subject: Subject
    name: str
    case: str = ""
    device: DeviceKind
    alone: bool = False
    backend: str | None = None

    @property
    def label(self) -> str:
        """The name with its case."""
        return f"{self.name} ({self.case})" if self.case else self.name


class CheckResult(Frozen):
    """How a check ended. `error` and `bound` are shares of `of`; `reason` says why it is not ok. `seconds` is null for
    a check that was not started."""

    check: SelfCheck
    status: CheckStatus
    error: float | None = None
    bound: float | None = None
    of: str | None = None
    how: str | None = None
    seconds: float | None = None
    reason: str | None = None


class SelfTestSummary(Frozen):
    """The outcome of a self-test in short: when it ended, how many checks ended how, and the names that failed."""

    ended_at: AwareDatetime
    ok: int
    failed: int
    not_possible: int
    failed_names: tuple[str, ...] = ()


class SelfTest(Frozen):
    """The checks of one device of this machine, and the hardware and software that they hold for."""

    format: int = SELFTEST_FORMAT
    device: DeviceKind
    ended_at: AwareDatetime
    hardware_fingerprint: str
    software_fingerprint: str
    optigpu_version: str
    git_revision: str | None = None
    results: tuple[CheckResult, ...]

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(result for result in self.results if result.status is CheckStatus.FAILED)

    @property
    def summary(self) -> SelfTestSummary:
        """It in short."""
        statuses = [result.status for result in self.results]
        return SelfTestSummary(
            ended_at=self.ended_at,
            ok=statuses.count(CheckStatus.OK),
            failed=statuses.count(CheckStatus.FAILED),
            not_possible=statuses.count(CheckStatus.NOT_POSSIBLE),
            failed_names=tuple(dict.fromkeys(result.check.name for result in self.failed)),
        )

    def followed_by(self, later: "SelfTest") -> "SelfTest":
        """The later one with the checks of this one that it did not repeat."""
        repeated = {_key(result.check) for result in later.results}
        kept = tuple(result for result in self.results if _key(result.check) not in repeated)
        return later.model_copy(update={"results": (*kept, *later.results)})


def _key(check: SelfCheck) -> tuple[str, str, str]:
    return check.subject, check.name, check.case
