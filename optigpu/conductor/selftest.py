"""Runs the self-test: each check in a process that several share, so that one that dies or hangs fails by itself."""

import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from optigpu import paths
from optigpu.backends import BACKENDS
from optigpu.child.messages import Checked, Checks, ListChecks, RunCheck
from optigpu.conductor.processes.asking import TimedWatch, ask
from optigpu.conductor.processes.child import Child
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
from optigpu.vocabulary import (
    DeviceKind,
    ReplicateError,
    SpecError,
    UnsupportedError,
)

SELFTEST = (sys.executable, "-P", "-m", "optigpu.child.selftest")
"""The program that runs checks. -P keeps files of the working directory from being taken for modules."""
CHECK_LIMIT_S = 600.0
"""What compiles takes half a minute on two cores, and several minutes beside other programs that use them."""
LIST_LIMIT_S = 120.0

_log = logging.getLogger(__name__)


class SelfTester:
    """What all checks of a self-test share.

    `cancelled` is asked at least once a second for a reason to stop. `doing` is told what goes on, and `ended` of each
    check that has ended.
    """

    def __init__(
        self,
        cancelled: Callable[[], str | None],
        doing: Callable[[str], None],
        ended: Callable[[CheckResult], None],
        *,
        program: Sequence[str] = SELFTEST,
        lock_dir: Path | None = None,
        limit_s: float = CHECK_LIMIT_S,
    ) -> None:
        self._cancelled, self._doing, self._ended = cancelled, doing, ended
        self._program, self._limit_s = tuple(program), limit_s
        self._locks = lock_dir or paths.lock_dir()

    def checks(self, only: Collection[str], device: DeviceKind | None) -> tuple[SelfCheck, ...]:
        """The checks with these names (all without one) of that device (of each without one).

        Raises SpecError for a name that no check has, ReplicateError if they cannot be listed, and CancelledError.
        """
        self._doing("listing the checks")
        threads = environment_for(DeviceKind.CPU).cpu_cores
        with Child(self._program, child_variables(threads)) as child:
            known = ask(child, ListChecks(), Checks, _watch(LIST_LIMIT_S, self._cancelled)).checks
        for name in only:
            _require_known(name, dict.fromkeys(check.name for check in known))
        chosen = [
            check
            for check in known
            if (not only or check.name in only) and (device is None or check.device is device)
        ]
        if not chosen:
            raise SpecError(f"{' and '.join(only)} has no check on {device}; leave --device out.")
        return tuple(chosen)

    def run(self, checks: Sequence[SelfCheck]) -> Iterator[SelfTest]:
        """The outcome of each device, as soon as all of its checks have ended.

        Raises CancelledError when it must stop, and what `hold` raises; no process is left behind.
        """
        for device in dict.fromkeys(check.device for check in checks):
            environment = environment_for(device)
            with self._runner(environment, device) as run_one:
                results = [self._told(run_one, check) for check in checks if check.device is device]
            yield outcome_of(environment, device, tuple(results))

    def _told(self, run_one: Callable[[SelfCheck], CheckResult], check: SelfCheck) -> CheckResult:
        self._doing(f"{check.label} on {check.device}")
        result = run_one(check)
        self._ended(result)
        return result

    @contextmanager
    def _runner(
        self, environment: Environment, device: DeviceKind
    ) -> Iterator[Callable[[SelfCheck], CheckResult]]:
        """What runs a check on a device, which is held meanwhile; on one that is not there, what says so."""
        if not environment.has(device):
            yield partial(_not_possible, reason=f"{no_device(device, environment)}.")
            return
        with (
            hold(self._locks, device, environment, self._wait) as descriptors,
            scratch_folder() as folder,
            _Process(self._program, environment, descriptors, folder) as process,
        ):
            yield lambda check: process.run(check, _watch(self._limit_s, self._cancelled))

    def _wait(self) -> None:
        """Another job has the device."""
        self._doing("waiting for the device, which a job uses")
        _watch(math.inf, self._cancelled).check()


class _Process:
    """The process that the next check runs in: the same as for the last one, unless that one failed in it.

    `engine` is the backend whose interpreter runs it, where that has an environment of its own.
    """

    def __init__(
        self,
        program: Sequence[str],
        environment: Environment,
        keep: Sequence[int],
        folder: Path,
        engine: str = PLAIN_BACKEND,
    ) -> None:
        self._program, self._environment = program, environment
        self._keep, self._folder, self._engine = keep, folder, engine
        self._child: Child | None = None
        self._open = ExitStack()

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, check: SelfCheck, watch: TimedWatch) -> CheckResult:
        """How the check ended: one that must be alone in another process, and this one waits. Raises CancelledError."""
        engine = check.backend or PLAIN_BACKEND
        missing = BACKENDS[engine].missing(self._environment)
        if missing:
            return _not_possible(check, missing)
        if not check.alone:
            return self._run(check, watch)
        with _Process(self._program, self._environment, self._keep, self._folder, engine) as own:
            return own._run(check, watch)

    def _run(self, check: SelfCheck, watch: TimedWatch) -> CheckResult:
        began_s = time.monotonic()
        try:
            answer = ask(self._ready(), self._order(check), Checked, watch)
        except UnsupportedError as error:
            result = _not_possible(check, str(error))
        except ReplicateError as error:
            # A kernel that failed may have left the device's context unusable.
            self._end()
            result = CheckResult(check=check, status=CheckStatus.FAILED, reason=str(error))
        else:
            result = _judged(check, answer)
        return result.model_copy(update={"seconds": time.monotonic() - began_s})

    def _order(self, check: SelfCheck) -> RunCheck:
        """Kernels run on every core. Small models run on one: their threads would mostly wait for each other."""
        threads = self._environment.cpu_cores if check.subject is Subject.KERNEL else 1
        return RunCheck(check=check, environment=self._environment, threads=threads, folder=str(self._folder))

    def _ready(self) -> Child:
        if self._child is None:
            program = program_of(self._engine, self._program)
            variables = child_variables(self._environment.cpu_cores) | variables_of(self._engine)
            self._child = self._open.enter_context(Child(program, variables, keep=self._keep))
        return self._child

    def _end(self) -> None:
        """Ends the process. One that not even SIGKILL ends is left to the driver, and the next check gets a new one."""
        self._child = None
        try:
            self._open.close()
        except ReplicateError as error:
            _log.warning("%s", error)


def _watch(limit_s: float, cancelled: Callable[[], str | None]) -> TimedWatch:
    """The limits of one check."""
    return TimedWatch(limit_s, cancelled, f"It hung: it had not ended after {limit_s:g} s, and was killed.")


def _judged(check: SelfCheck, found: Checked) -> CheckResult:
    """Failed unless the error is a number within the bound."""
    result = CheckResult(
        check=check,
        status=CheckStatus.OK,
        error=found.error,
        bound=found.bound,
        of=found.of,
        how=found.how or None,
    )
    if found.error is not None and found.error <= found.bound:
        return result
    wrong = (
        "The error is NaN or infinite."
        if found.error is None
        else f"The largest error is {found.error:.3g} of {found.of}, and the bound is {found.bound:g}."
    )
    return result.model_copy(update={"status": CheckStatus.FAILED, "reason": wrong})


def _not_possible(check: SelfCheck, reason: str) -> CheckResult:
    return CheckResult(check=check, status=CheckStatus.NOT_POSSIBLE, reason=reason)


def _require_known(name: str, names: Collection[str]) -> None:
    if name not in names:
        hint = did_you_mean(closest(name, names)[:1])
        raise SpecError(f"There is no check {name!r}.{hint} The checks are {', '.join(names)}.")
