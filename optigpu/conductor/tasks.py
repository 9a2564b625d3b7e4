"""Tasks of processes beside the measuring of variants.

Making smaller models and predicting what training needs hold the CPU as a job does. A device proves that it works by
multiplying two small matrices: a worker without this proof would take jobs and fail one after the other. The self-test
runs each check in a process that several share, so that one that dies or hangs fails by itself.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from optigpu import paths
from optigpu.backends import BACKENDS
from optigpu.child.messages import (
    Checked,
    Checks,
    ListChecks,
    PredictTraining,
    Proven,
    RecipeMade,
    RunCheck,
    RunProof,
    RunRecipe,
    TrainingPredicted,
)
from optigpu.conductor.processes.child import END_GRACE_S, TASKS, Child, TimedWatch, ask, readable
from optigpu.conductor.processes.confinement import PATIENT, child_variables, scratch_folder
from optigpu.conductor.processes.room import hold
from optigpu.conductor.session import environment_for
from optigpu.documents.fields import closest, did_you_mean
from optigpu.documents.result import Environment
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, SelfTest, Subject
from optigpu.engines.environments import program_of, variables_of
from optigpu.fit.memory import FitOfTraining, TrainingAsked, fit_of
from optigpu.hardware import probe
from optigpu.hardware.device_kinds import KINDS, no_device
from optigpu.recipes.request import RecipeOutcome, RecipeRequest, check_output
from optigpu.selftest.kept import outcome_of
from optigpu.selftest.setting import PLAIN_BACKEND
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, OutOfMemoryError, ReplicateError, SpecError, UnsupportedError

PREDICTION_S = 600.0
"""A step of eight billion parameters takes seconds on tensors without numbers."""


def make_smaller(
    request: RecipeRequest,
    doing: Callable[[str], None],
    cancelled: Callable[[], str | None],
    limit_s: float,
    *,
    program: Sequence[str] = TASKS,
) -> RecipeOutcome:
    """Makes the model. `doing` is told what goes on, and `cancelled` asked for a reason to stop. Raises SpecError for
    a folder that cannot be written, UnsupportedError for a model that cannot be made smaller so, ReplicateError if a
    loss is not finite or the process fails, OverdueError after `limit_s`, and CancelledError."""
    check_output(request.output)
    overdue = (
        f"The recipe had not ended after {limit_s:g} s, and nothing was written; ask for fewer steps, or raise "
        "--timeout."
    )
    watch = TimedWatch(limit_s, cancelled, overdue, doing)
    resolved = request.model_copy(update={"output": request.output.resolve()})
    with _holding_the_cpu(program, watch, PATIENT) as (child, threads):
        return ask(child, RunRecipe(request=resolved, threads=threads), RecipeMade, watch).outcome


def fit_training(
    asked: TrainingAsked,
    stacks: Sequence[tuple[Technique, ...]],
    doing: Callable[[str], None],
    cancelled: Callable[[], str | None],
    *,
    program: Sequence[str] = TASKS,
) -> FitOfTraining:
    """Predicts every stack. `doing` is told what goes on, and `cancelled` asked for a reason to stop. Raises
    ReplicateError if the predicting process fails, OverdueError after ten minutes, and CancelledError."""
    overdue = f"The prediction had not ended after {PREDICTION_S:g} s; ask for fewer stacks, or for a smaller model."
    watch = TimedWatch(PREDICTION_S, cancelled, overdue, doing)
    order = PredictTraining(model=asked.model, stacks=tuple(stacks), workloads=asked.workloads)
    with _holding_the_cpu(program, watch) as (child, _):
        doing("predicting a step of training with each stack")
        return fit_of(asked, stacks, ask(child, order, TrainingPredicted, watch).stacks)


@contextmanager
def _holding_the_cpu(
    program: Sequence[str], watch: TimedWatch, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[Child, int]]:
    """A process with `more` variables, and how many threads it has."""
    environment = environment_for(DeviceKind.CPU)
    threads = environment.cpu_cores

    def wait() -> None:
        watch.show("waiting for the CPU, which a job uses")
        watch.check()

    with (
        hold(paths.lock_dir(), DeviceKind.CPU, environment, wait) as descriptors,
        Child(program, {**child_variables(threads), **more}, keep=descriptors) as child,
    ):
        yield child, threads


PROOF_S = 180.0
"""How long it may take: torch and the driver's libraries may have to be read from a slow disk."""

OLD_DRIVER = (
    "The NVIDIA driver {driver} is too old for torch {torch}: it runs CUDA up to {cuda}, and this torch was built for "
    "CUDA {torch_cuda}; update the driver, or install a torch for CUDA {cuda} or older."
)
NO_GPU = (
    "torch finds no GPU, although the driver lists {gpu}; check with nvidia-smi that the GPU answers, and that this "
    "user may open the files /dev/nvidia*."
)
NO_KERNELS = (
    "torch {torch} has no kernels for {gpu} (compute capability {capability}); install a torch that was built for it, "
    "or start the worker with --device cpu."
)
SENTENCES: dict[str, str] = {
    "driver on your system is too old": OLD_DRIVER,
    "CUDA driver version is insufficient": OLD_DRIVER,
    "forward compatibility was attempted": OLD_DRIVER,
    "not compiled with CUDA enabled": (
        "torch {torch} was built without CUDA and cannot use {gpu}; install a CUDA build of torch, or start the worker "
        "with --device cpu."
    ),
    "no kernel image is available": NO_KERNELS,
    "ARCH_MISMATCH": NO_KERNELS,
    "Found no NVIDIA driver": NO_GPU,
    "No CUDA GPUs are available": NO_GPU,
    "no CUDA-capable device is detected": NO_GPU,
    "busy or unavailable": (
        "Another process has {gpu} for itself; end it (nvidia-smi shows it), or let several processes use the GPU "
        "with: nvidia-smi -c DEFAULT."
    ),
    "no temporary directory": (
        "{reason}: give the folder of OPTIGPU_DATA_DIR to the user that the worker runs as."
    ),
    "system not yet initialized": (
        "The fabric manager of {gpu} does not run; start it with: systemctl start nvidia-fabricmanager."
    ),
}
"""What to say, by a part of the error of torch or CUDA."""
NO_HOST_MEMORY = "This host has too little free memory to load torch; free some and start the worker again."
NO_GPU_MEMORY = (
    "{gpu} has too little free memory to multiply small matrices; end the processes that hold it ({tool} shows them) "
    "and start the worker again."
)
OTHERWISE_CPU = "torch {torch} cannot multiply small matrices on this CPU: {reason}; install torch again."
OTHERWISE_GPU = (
    "torch {torch} cannot multiply small matrices on {gpu}: {reason}; check the GPU with {tool}, or start the worker "
    "with --device cpu."
)


def prove(
    device: DeviceKind,
    *,
    cancelled: Callable[[], str | None],
    program: Sequence[str] = TASKS,
    within_s: float = PROOF_S,
) -> None:
    """Returns once the device has computed what it was asked to. `cancelled` is asked four times a second. Raises
    UnsupportedError with the reason and what helps if it does not in time, CancelledError when asked to stop."""
    watch = TimedWatch(within_s, cancelled, f"there was no answer within {within_s:g} s")
    try:
        with Child(program, child_variables(1)) as child:
            ask(child, RunProof(device=device), Proven, watch)
    except (ReplicateError, UnsupportedError) as error:
        raise UnsupportedError(sentence(error, device, probe())) from error


def sentence(error: Exception, device: DeviceKind, environment: Environment) -> str:
    on_cpu = device is DeviceKind.CPU
    if isinstance(error, OutOfMemoryError):
        text = NO_HOST_MEMORY if on_cpu else NO_GPU_MEMORY
    else:
        known = (text for part, text in SENTENCES.items() if part.lower() in str(error).lower())
        text = next(known, OTHERWISE_CPU if on_cpu else OTHERWISE_GPU)
    # The first line, and the last one, where the output of a process follows.
    lines = readable(str(error)).splitlines() or ["it said nothing"]
    gpu = next(iter(environment.gpus(device)), None)
    facts = {
        "reason": " ... ".join(dict.fromkeys((lines[0], lines[-1]))).rstrip("."),
        "tool": KINDS[device].tool,
        "gpu": gpu.name if gpu else "the GPU",
        "capability": gpu.compute_capability if gpu else None,
        "driver": environment.driver,
        "cuda": environment.cuda,
        "torch": environment.software.get("torch"),
        "torch_cuda": environment.software.get("torch_cuda"),
    }
    return text.format(**{name: value or "unknown" for name, value in facts.items()})


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
