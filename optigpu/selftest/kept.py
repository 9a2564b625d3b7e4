"""The outcome of the last self-test of each device, in the data folder: what later runs and workers go by. A file is of
one device of one hardware, and holds for the software that it names. One that is broken, of other software or cannot be
read is ignored, with a sentence."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from optigpu import __version__
from optigpu.documents.result import Environment
from optigpu.documents.selftest import CheckResult, SelfTest, Subject
from optigpu.hardware.probe import hardware_fingerprint, software_fingerprint
from optigpu.paths import data_dir, draft_of
from optigpu.vocabulary import DeviceKind, OptiGPUError, utc_now

AGAIN = "run `optigpu selftest` again"


@dataclass(frozen=True)
class Kept:
    """`outcome` is None where there is none that holds here; `ignored` says why a file was not used."""

    outcome: SelfTest | None = None
    ignored: str | None = None

    @property
    def failed_techniques(self) -> Mapping[str, str]:
        """For each technique that failed, the sentence that refuses it."""
        failed = self.outcome.failed if self.outcome else ()
        return {
            result.check.name: refusal(result)
            for result in failed
            if result.check.subject is Subject.TECHNIQUE
        }


def refusal(result: CheckResult) -> str:
    name, why = result.check.name, (result.reason or "").rstrip(".")
    case = f", with {result.check.case}" if result.check.case else ""
    return (
        f"{name} failed its self-test here{case}: {why}. Change the software, or run `optigpu selftest --only {name}` "
        "again."
    )


def outcome_of(environment: Environment, device: DeviceKind, results: tuple[CheckResult, ...]) -> SelfTest:
    """The results as a document that holds for this hardware and software."""
    return SelfTest(
        device=device,
        ended_at=utc_now(),
        hardware_fingerprint=_hardware(environment, device),
        software_fingerprint=software_fingerprint(environment),
        optigpu_version=__version__,
        git_revision=environment.git_revision,
        results=results,
    )


def read(environment: Environment, device: DeviceKind) -> Kept:
    """What is kept of that device of this machine. Raises nothing."""
    path = path_of(environment, device)
    try:
        outcome = SelfTest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return Kept()
    except OSError as error:
        return Kept(ignored=f"The self-test in {path} cannot be read ({error.strerror}); {AGAIN}.")
    except ValidationError:
        return Kept(ignored=f"The file {path} holds no self-test of this version; {AGAIN}.")
    found, wanted = (
        each.model_dump(exclude={"ended_at", "results"})
        for each in (outcome, outcome_of(environment, device, ()))
    )
    if found != wanted:
        return Kept(ignored=f"The self-test in {path} was of other software or hardware; {AGAIN}.")
    return Kept(outcome)


def keep(outcome: SelfTest, environment: Environment) -> Path:
    """Writes the outcome, with the checks of the kept one that it did not repeat: whole or not at all. Raises
    OptiGPUError if it cannot be written."""
    before = read(environment, outcome.device).outcome
    path = path_of(environment, outcome.device)
    whole = before.followed_by(outcome) if before else outcome
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(path) as draft:
            draft.write_text(whole.model_dump_json(indent=1))
    except OSError as error:
        raise OptiGPUError(
            f"The self-test could not be kept in {path.parent} ({error.strerror}), so later runs do not know of it; "
            "free space there, or name another folder in OPTIGPU_DATA_DIR."
        ) from error
    return path


def path_of(environment: Environment, device: DeviceKind) -> Path:
    """The file of that device of this machine; it may not exist."""
    return data_dir() / "selftest" / f"{device}-{_hardware(environment, device)}.json"


def _hardware(environment: Environment, device: DeviceKind) -> str:
    """The fingerprint of what a job on that device uses: of several GPUs the first."""
    gpus = environment.gpus(device)[:1]
    return hardware_fingerprint(environment.model_copy(update={"accelerators": gpus}))
