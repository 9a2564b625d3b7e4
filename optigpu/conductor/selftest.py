"""Runs the self-test: each check in a process that several share, so that one that dies or hangs fails by itself."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from optigpu import paths
from optigpu.backends import BACKENDS
from optigpu.child.messages import Checked, Checks, ListChecks, RunCheck
from optigpu.conductor.processes.child import END_GRACE_S, TASKS, Child, TimedWatch, ask
from optigpu.conductor.processes.confinement import scratch_folder
from optigpu.conductor.processes.locks import hold
from optigpu.conductor.processes.variables import child_variables
from optigpu.conductor.session import environment_for
from optigpu.documents.fields import closest, did_you_mean
from optigpu.documents.result import Environment
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, SelfTest, Subject
from optigpu.engines.environments import program_of, variables_of
from optigpu.hardware.device_kinds import no_device
from optigpu.selftest.kept import outcome_of
from optigpu.selftest.setting import PLAIN_BACKEND
from optigpu.vocabulary import DeviceKind, ReplicateError, SpecError, UnsupportedError

CHECK_LIMIT_S = 600.0
"""What compiles takes half a minute on two cores, and several minutes beside other programs that use them."""
LIST_LIMIT_S = 120.0

_log = logging.getLogger(__name__)


class SelfTester:
    """What all checks of a self-test share. `cancelled` is asked at least once a second for a reason to stop. `doing`
    is told what goes on, and `ended` of each check that has ended."""

    def __init__(
        self,
        cancelled: Callable[[], str | None],
        doing: Callable[[str], None],
        ended: Callable[[CheckResult], None],
        *,
        program: Sequence[str] = TASKS,
        limit_s: float = CHECK_LIMIT_S,
    ) -> None:
        self._cancelled, self._doing, self._ended = cancelled, doing, ended
        self._program, self._limit_s = program, limit_s

    def checks(self, only: Collection[str], device: DeviceKind | None) -> tuple[SelfCheck, ...]:
        """The checks with these names (all without one) of that device (of each without one). Raises SpecError for a
        name that no check has, ReplicateError if they cannot be listed, and CancelledError."""
        self._doing("listing the checks")
        threads = environment_for(DeviceKind.CPU).cpu_cores
        with Child(self._program, child_variables(threads)) as child:
            known = ask(child, ListChecks(), Checks, self._watch(LIST_LIMIT_S)).checks
        names = list(dict.fromkeys(check.name for check in known))
        for name in only:
            if name not in names:
                hint = did_you_mean(closest(name, names)[:1])
                raise SpecError(f"There is no check {name!r}.{hint} The checks are {', '.join(names)}.")
        chosen = [check for check in known if not only or check.name in only]
        chosen = [check for check in chosen if device is None or check.device is device]
        if not chosen:
            raise SpecError(f"{' and '.join(only)} has no check on {device}; leave --device out.")
        return tuple(chosen)

    def run(self, checks: Sequence[SelfCheck]) -> Iterator[SelfTest]:
        """The outcome of each device, as soon as all of its checks have ended. Raises CancelledError when it must
        stop, and what `hold` raises; no process is left behind."""
        for device in dict.fromkeys(check.device for check in checks):
            environment, results = environment_for(device), []
            with self._runner(environment, device) as run_one:
                for check in (check for check in checks if check.device is device):
                    self._doing(f"{check.label} on {check.device}")
                    results.append(run_one(check))
                    self._ended(results[-1])
            yield outcome_of(environment, device, tuple(results))

    @contextmanager
    def _runner(
        self, environment: Environment, device: DeviceKind
    ) -> Iterator[Callable[[SelfCheck], CheckResult]]:
        """What runs a check on a device, which is held meanwhile; on one that is not there, what says so."""
        if not environment.has(device):
            yield partial(_not_possible, reason=f"{no_device(device, environment)}.")
            return

        def wait() -> None:
            self._doing("waiting for the device, which a job uses")
            self._watch(math.inf).check()

        with (
            hold(paths.lock_dir(), device, environment, wait) as descriptors,
            scratch_folder() as folder,
            closing(_Process(self._program, environment, descriptors, folder)) as process,
        ):
            yield lambda check: process.run(check, self._watch(self._limit_s))

    def _watch(self, limit_s: float) -> TimedWatch:
        overdue = f"It hung: it had not ended after {limit_s:g} s, and was killed."
        return TimedWatch(limit_s, self._cancelled, overdue)


@dataclass
class _Process:
    """The process of the next check: that of the last one, unless that one failed in it. `engine` is the backend whose
    interpreter runs it, where that has an environment of its own."""

    program: Sequence[str]
    environment: Environment
    keep: Sequence[int]
    folder: Path
    engine: str = PLAIN_BACKEND
    child: Child | None = None

    def run(self, check: SelfCheck, watch: TimedWatch) -> CheckResult:
        """How the check ended: one that must be alone in another process, and this one waits. Raises CancelledError."""
        engine = check.backend or PLAIN_BACKEND
        missing = BACKENDS[engine].missing(self.environment)
        if missing:
            return _not_possible(check, missing)
        if not check.alone:
            return self._run(check, watch)
        with closing(replace(self, engine=engine, child=None)) as own:
            return own._run(check, watch)

    def _run(self, check: SelfCheck, watch: TimedWatch) -> CheckResult:
        began_s = time.monotonic()
        # Kernels run on every core. Small models run on one: their threads would mostly wait for each other.
        cores = self.environment.cpu_cores
        threads = cores if check.subject is Subject.KERNEL else 1
        order = RunCheck(check=check, environment=self.environment, threads=threads, folder=str(self.folder))
        try:
            if self.child is None:
                variables = child_variables(cores) | variables_of(self.engine)
                self.child = Child(program_of(self.engine, self.program), variables, keep=self.keep)
            result = _judged(check, ask(self.child, order, Checked, watch))
        except UnsupportedError as error:
            result = _not_possible(check, str(error))
        except ReplicateError as error:
            # A kernel that failed may have left the device's context unusable.
            self.close()
            result = CheckResult(check=check, status=CheckStatus.FAILED, reason=str(error))
        return result.model_copy(update={"seconds": time.monotonic() - began_s})

    def close(self) -> None:
        """Ends the process. One that not even SIGKILL ends is left to the driver, and the next check gets a new one."""
        child, self.child = self.child, None
        try:
            if child:
                child.end(END_GRACE_S)
        except ReplicateError as error:
            _log.warning("%s", error)


def _judged(check: SelfCheck, found: Checked) -> CheckResult:
    wrong = None
    if found.error is None:
        wrong = "The error is NaN or infinite."
    elif found.error > found.bound:
        wrong = f"The largest error is {found.error:.3g} of {found.of}, and the bound is {found.bound:g}."
    return CheckResult(
        check=check,
        status=CheckStatus.FAILED if wrong else CheckStatus.OK,
        reason=wrong,
        error=found.error,
        bound=found.bound,
        of=found.of,
        how=found.how or None,
    )


def _not_possible(check: SelfCheck, reason: str) -> CheckResult:
    return CheckResult(check=check, status=CheckStatus.NOT_POSSIBLE, reason=reason)
