"""The session of one job: the locks, folders and monitor that its measuring processes share. And a variant's first
figures, shown as soon as its process has run a short request; no result is made of them."""

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from types import MappingProxyType

import psutil

from optigpu import paths
from optigpu.child.messages import Assignment, Metered
from optigpu.conductor.processes.child import Child
from optigpu.conductor.processes.confinement import (
    PATIENT,
    child_variables,
    needs_network,
    recorded_variables,
    scratch_folder,
    secrets_of,
)
from optigpu.conductor.processes.room import MakeMemoryRule, MemoryBudget, hold, others_measure
from optigpu.conductor.progress import NO_GUESSES, JobProgress
from optigpu.conductor.saturation import Saturation
from optigpu.conductor.verdicts.host_monitor import HostMonitor
from optigpu.documents.endpoints import parse_endpoint
from optigpu.documents.events import Event, Printed, RoughlyMeasured
from optigpu.documents.result import Environment, Rough
from optigpu.engines.environments import program_of, software_of, variables_of
from optigpu.hardware import hardware_class, probe
from optigpu.hardware.counters import cpu_clock_s
from optigpu.hardware.probe import software_fingerprint
from optigpu.job.estimate import Plan
from optigpu.job.spec import JobSpec, Variant
from optigpu.selftest import kept
from optigpu.statistics.compare import PROCESSES_DIFFER
from optigpu.variables import hub_refusal
from optigpu.vocabulary import METRICS, Better, DeviceKind, Role, UnsupportedError

REQUESTS_DIFFER = 0.1
"""A short request is taken to differ from others by 10% (one standard deviation), and by what its steps differ by."""
QUARTILES_APART = 1.349
"""Of a normal distribution, in standard deviations."""
OF_A_MEDIAN = 1.253
"""The standard error of a normal sample's median over that of its mean."""


@dataclass
class RoughLooks:
    """The rough figures of a job's variants, by their index, told as they come."""

    metric: str
    tell: Callable[[RoughlyMeasured], None]
    found: dict[int, Rough] = field(default_factory=dict)
    baseline_of: dict[int, int | None] = field(default_factory=dict)
    """The variant that each is compared with: None for a baseline, and without one."""
    _baselines: dict[str, int] = field(default_factory=dict)

    def saw(self, variant: Variant, samples: Mapping[str, float]) -> None:
        """A request of the warm-up gave these samples. The first one is told at once, and later ones replace it."""
        is_first = variant.index not in self.found
        self.looked(variant, (samples.get(self.metric, 0.0),))
        if is_first:
            self.told(variant.index)

    def looked(self, variant: Variant, values: Sequence[float]) -> None:
        """A short request gave these values of the metric, one for each of its steps."""
        if not _are_valid(values):
            return
        if variant.role is Role.BASELINE:
            self._baselines.setdefault(variant.workload_digest, variant.index)
        found = self._baselines.get(variant.workload_digest)
        self.baseline_of[variant.index] = None if found == variant.index else found
        centre, error = _logarithm([values])
        known = {"value": math.exp(centre), "ci": _interval(centre, error)}
        rough = self.found.get(variant.index) or Rough(metric=self.metric, **known)
        self.found[variant.index] = rough.model_copy(update=known)

    def told(self, index: int, **known: object) -> None:
        """Tells a variant's figures, with those that are `known` by now, if it has any."""
        if index in self.found:
            self.found[index] = self.found[index].model_copy(update=known)
            self.tell(RoughlyMeasured(index=index, rough=self.found[index]))

    def beside(self, index: int, theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> None:
        """Tells the ratio by short requests of the baseline and of the variant that took turns."""
        if not all(map(_are_valid, (*theirs, *ours))):
            return
        (before, its_error), (after, error) = _logarithm(theirs), _logarithm(ours)
        gain = after - before if METRICS[self.metric].better is Better.HIGHER else before - after
        bounds = _interval(gain, math.hypot(error, its_error))
        self.told(index, ratio=math.exp(gain), ratio_ci=bounds)

    def read(self, index: int, quality: Metered) -> None:
        """The quality of the first tokens was read."""
        if "kld_mean" in quality.values:
            self.told(index, **{name: quality.values.get(name) for name in ("kld_mean", "top1_agreement")})


def _are_valid(values: Sequence[float]) -> bool:
    return bool(values) and all(0 < value < math.inf for value in values)


def _logarithm(requests: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The median logarithm of the values of all requests, and its standard error, with what processes differ by. The
    steps of a request are not independent: they count as one."""
    logs = [math.log(value) for values in requests for value in values]
    lower, _, upper = quantiles(logs, n=4) if len(logs) > 1 else (0.0, 0.0, 0.0)
    spread = math.hypot((upper - lower) / QUARTILES_APART, REQUESTS_DIFFER)
    return median(logs), math.hypot(OF_A_MEDIAN * spread / math.sqrt(len(requests)), PROCESSES_DIFFER)


def _interval(centre: float, error: float) -> tuple[float, float]:
    return math.exp(centre - 1.96 * error), math.exp(centre + 1.96 * error)


MOST_ANSWER_S, ANSWERS = 600.0, 4
"""A server may take so long for one answer, and no more than that part of the time that a job has left when a process
starts: a process asks it for many more, and a server that hangs leaves the others their time."""

_log = logging.getLogger(__name__)


@dataclass
class Session:
    """One job on its device. To be made before its first measuring process starts, so that the monitor counts every
    process on the GPU at that time as foreign."""

    spec: JobSpec
    environment: Environment
    # How many threads each measuring process computes with.
    threads: int
    # The command that starts a measuring process, in OptiGPU's own environment.
    program: tuple[str, ...]
    # The job's locks, which its processes inherit.
    descriptors: tuple[int, ...]
    # The job's scratch directory.
    folder: str
    progress: JobProgress
    on_event: Callable[[Event], None]
    # Whether another job is measured on this host.
    others: Callable[[], bool] = lambda: False
    # Makes what decides how many processes fit into memory.
    memory_rule: MakeMemoryRule = MemoryBudget
    # How many processes measure each variant, where the job's time is known not to suffice for all that it asks for.
    fitting: int | None = None
    # How long the job was expected to take before it began.
    foreseen_s: float = 0.0
    # Why techniques that failed their self-test on this machine are not run, by their names.
    failed_techniques: Mapping[str, str] = field(default_factory=dict)
    # Which rates a server could not keep up with.
    saturation: Saturation = field(default_factory=Saturation)
    monitor: HostMonitor = field(init=False)
    rough: RoughLooks = field(init=False)
    # How many times as long everything takes beside programs that were at work when the job began.
    slowed: float = field(init=False, default=1.0)
    _running: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        serving = serving_sessions(self.spec.endpoints)
        self.monitor = HostMonitor(
            self.spec.device, self.environment, lambda: self._running | serving, self.others
        )
        self.progress.timeline.cpu_clocks = self._cpu_clocks
        self.rough = RoughLooks(self.spec.primary, self.on_event)

    def in_round(self, plan: Plan, on_event: Callable[[Event], None]) -> "Session":
        """This session for a round of a search: its job is another one, device, processes and progress are the same."""
        found = copy(self)
        found.spec, found.fitting, found.on_event = plan.spec, plan.replicates, on_event
        return found

    def _cpu_clocks(self) -> dict[int, float]:
        """The CPU seconds of each running process."""
        return {pid: used_s for pid in self._running if (used_s := cpu_clock_s(pid)) is not None}

    @property
    def replicates(self) -> int:
        return self.fitting or self.spec.measure.replicates

    @property
    def beside_others(self) -> bool:
        return self.slowed > 1

    def share_cpus(self, slowed: float) -> None:
        """Others are at work, so that everything takes about `slowed` times as long. From now on threads of its
        processes sleep while they wait for each other, which its results record."""
        variables = {**self.environment.variables, **PATIENT}
        self.environment = self.environment.model_copy(update={"variables": variables})
        self.slowed = slowed
        self.progress.slow_down(slowed)

    def assignment(self, variant: Variant, replicate: int) -> Assignment:
        """The first message to a process that measures this variant, for no longer than its share of the job's time."""
        most = {"max_seconds": self.progress.most_sample_s()}
        folder = Path(self.folder)
        if len(self.spec.models) > 1:  # each of several models has a folder and a reference of its own
            folder /= f"model-{self.spec.models.index(str(variant.model))}"
            folder.mkdir(exist_ok=True)
        return Assignment(
            variant=variant,
            environment=self.environment_of(variant),
            measure=self.spec.measure.model_copy(update=most),
            seed=self.spec.seed,
            replicate=replicate,
            folder=str(folder),
            threads=self.threads,
            answer_s=min(MOST_ANSWER_S, self.progress.time_left_s / ANSWERS),
        )

    def environment_of(self, variant: Variant) -> Environment:
        """The machine, with the software of the engine's own environment where the variant's engine has one."""
        software = software_of(variant.backend, self.environment.software)
        if software == self.environment.software:
            return self.environment
        found = self.environment.model_copy(update={"software": software})
        return found.model_copy(update={"software_fingerprint": software_fingerprint(found)})

    def require_sound(self, variant: Variant) -> None:
        for technique in variant.stack:
            if technique.name in self.failed_techniques:
                raise UnsupportedError(self.failed_techniques[technique.name])

    @contextmanager
    def child(
        self, variant: Variant, program: Sequence[str] = (), more: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[Child]:
        """A new process that measures this variant, or does what `program` does with it, with `more` variables. While
        it lives, the monitor counts it as the job's own; at its end the listener is told what it has printed. Raises
        UnsupportedError for a model of the hub that the settings do not allow."""
        for repository in variant.hub_repositories:
            if refusal := hub_refusal(repository):
                raise UnsupportedError(refusal)
        started = program_of(variant.backend, program or self.program)
        variables = child_variables(self.threads, secrets=secrets_of(variant))
        waiting = PATIENT if self.beside_others else {}
        variables |= {**variables_of(variant.backend), **waiting, **more}
        quality = self.spec.measure.quality if "quality" in self.spec.measure.meters else None
        network = needs_network(variant, quality)
        child = Child(started, variables, keep=self.descriptors, network=network)
        try:
            with child:
                self._running.add(child.pid)
                yield child
        finally:
            self._running.discard(child.pid)
            if child.printed:
                self.on_event(Printed(index=variant.index, text=child.printed))


@contextmanager
def open_session(
    spec: JobSpec,
    indexes: Collection[int],
    on_event: Callable[[Event], None],
    *,
    program: Sequence[str],
    cancelled: Callable[[], str | None],
    lock_dir: Path | None = None,
    threads: int | None = None,
    memory_rule: MakeMemoryRule = MemoryBudget,
    plan: Plan | None = None,
) -> Iterator[Session]:
    """A session that measures the variants with these indexes and has its device for itself while the block lasts.
    `plan` says how many replicates fit into the job's time, and how long they take; None: all, and it is not known.
    Raises what `hold` and `progress.check` raise while the job waits for the device."""
    environment = environment_for(spec.device)
    replicates = plan.replicates if plan else spec.measure.replicates
    guesses = plan.guesses if plan else NO_GUESSES
    progress = JobProgress(
        on_event,
        cancelled,
        indexes,
        replicates,
        guesses=guesses,
        measure=spec.measure,
        prepare_s=plan.prepare_s if plan else 0.0,
    )
    locks = lock_dir or paths.lock_dir()
    with hold(locks, spec.device, environment, progress.check) as descriptors, scratch_folder() as folder:
        tested = kept.read(environment, spec.device)  # a self-test may have ended while the job waited
        if tested.ignored:
            _log.warning("%s", tested.ignored)
        yield Session(
            spec=spec,
            environment=environment,
            threads=threads or environment.cpu_cores,
            program=tuple(program),
            descriptors=descriptors,
            folder=str(folder),
            progress=progress,
            on_event=on_event,
            others=partial(others_measure, locks, spec.device, environment),
            memory_rule=memory_rule,
            fitting=plan.replicates if plan else None,
            foreseen_s=plan.seconds if plan else 0.0,
            failed_techniques=tested.failed_techniques,
        )


def environment_for(device: DeviceKind) -> Environment:
    """This machine as a job on `device` uses it: the class of its one device, the variables of its processes."""
    environment = probe()
    return environment.model_copy(
        update={"hardware_class": hardware_class(environment, device), "variables": recorded_variables()}
    )


def serving_sessions(endpoints: Iterable[str]) -> frozenset[int]:
    """The sessions of the processes that listen at these endpoints; not of servers elsewhere, nor of hidden ones."""
    parsed = map(parse_endpoint, endpoints)
    ports = {endpoint.port for endpoint in parsed if endpoint.is_loopback}
    if not ports:
        return frozenset()
    found: set[int] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            connections = process.net_connections("tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port in ports for each in connections):
                found.add(os.getsid(process.pid))
    return frozenset(found)
