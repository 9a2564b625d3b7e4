"""Measuring processes that are asked as the conductor asks: real ones, and one in this process."""

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from optigpu.child import replicate
from optigpu.child.messages import ANSWER, Answer, Assignment, Ready
from optigpu.conductor.processes.child import Child, ask
from optigpu.conductor.processes.confinement import child_variables
from optigpu.conductor.processes.residents import WarmUpWatch
from optigpu.conductor.processes.rounds import Replicate, TimedRounds, audit
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.verdicts.cost import Evidence
from optigpu.conductor.verdicts.disturbance import Goal, Yardstick
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.conductor.verdicts.judge import judge
from optigpu.documents.result import Verdict
from optigpu.hardware.probe import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import DeviceKind, Frozen

ROUNDS, ROUND_S = 4, 0.5
SPEC = JobSpec.model_validate(
    {
        "workload": {"kind": "generate", "prompt_tokens": 8, "new_tokens": 8},
        "model": "preset:tiny-llama-test",
        "measure": {
            "min_seconds": ROUNDS * ROUND_S,
            "max_seconds": 60,
            "replicates": 1,
            "raise_priority": False,
        },
    }
)
"""At the usual priority: what the tests do to the process would be kept from it otherwise."""
VARIANT = variants_of(SPEC)[0]

Disturb = Callable[[int, Child], None]
"""Called before each round, with the round's number from 0."""


def leave_alone(number: int, child: Child) -> None:
    """Nothing happens."""


@dataclass(frozen=True)
class Standing:
    """A ready process and its assignment. Several timeds may follow each other."""

    child: Child
    ready: Ready
    assignment: Assignment
    progress: JobProgress
    warm_up: HostSample | None = None

    def timed_rounds(self, monitor: HostMonitor) -> TimedRounds:
        """Rounds from the first one on."""
        return TimedRounds(self.child, self.ready, self.assignment, monitor, self.warm_up)


@contextmanager
def standing_ready(folder: Path, command: Sequence[str]) -> Iterator[Standing]:
    """Starts `command` as a measuring process of one thread."""
    with Child(command, child_variables(1)) as child:
        yield standing(child, folder)


def standing(child: Child, folder: Path) -> Standing:
    """Has a process get ready for one thread."""
    assignment = Assignment(
        variant=VARIANT,
        environment=probe(),
        measure=SPEC.measure,
        seed=0,
        replicate=0,
        folder=str(folder),
        threads=1,
    )
    progress = JobProgress(lambda _: None, lambda: None, [0], 1)
    watch = WarmUpWatch(progress, HostMonitor(DeviceKind.CPU, probe(), lambda: {child.pid}))
    ready = ask(child, assignment, Ready, watch)
    return Standing(child, ready, assignment, progress, watch.sample())


def measured(standing: Standing, disturb: Disturb = leave_alone, rounds: int = ROUNDS) -> Replicate:
    """One replicate as the conductor measures it, with its audit and without meters."""
    monitor = HostMonitor(DeviceKind.CPU, probe(), lambda: {standing.child.pid})
    timed = standing.timed_rounds(monitor)
    for number in range(rounds):
        disturb(number, standing.child)
        timed.measure_one(standing.progress)
    audited, during = audit(standing.child, standing.ready, monitor, standing.progress)
    return replace(timed.replicate(), audit=audited, audit_sample=during)


def verdict(replicate: Replicate) -> Verdict:
    """What the conductor would say of it."""
    return judge(SPEC, VARIANT, [evidence(replicate)], {})


def verdict_as_if_alone(replicate: Replicate) -> Verdict:
    """What it would say if nothing else had run on this machine meanwhile."""
    alone = tuple(HostSample(wall_s=sample.wall_s, cpus=sample.cpus) for sample in replicate.host_samples)
    return verdict(replace(replicate, host_samples=alone))


def evidence(replicate: Replicate) -> Evidence:
    """The rounds that its figures come from, by the fastest probe of any of them."""
    probes = [sample.probe_s for sample in replicate.host_samples if sample.probe_s]
    yardstick = Yardstick(DeviceKind.CPU, min(probes, default=None))
    goal = Goal.of(SPEC.measure, replicate.ready.request_s)
    return Evidence(1, replicate, replicate.selection(yardstick, goal))


class InProcess:
    """Told and listened to as a `Child` is. Every message is JSON on its way, and every answer too."""

    pid = os.getpid()

    def __init__(self) -> None:
        self._answers: deque[str] = deque()
        self._subject: replicate.Subject | None = None

    def tell(self, message: Frozen) -> None:
        """Has it answered before this returns; the first message is the assignment."""
        line = message.model_dump_json()
        if self._subject is None:
            self._subject = replicate._begin(line, self._say)
        else:
            self._say(replicate._obey(line, self._subject, self._say))

    def listen(self) -> Answer:
        """The next answer, of those that there are."""
        return ANSWER.validate_json(self._answers.popleft())

    def _say(self, answer: Answer) -> None:
        self._answers.append(answer.model_dump_json())


@contextmanager
def in_process() -> Iterator[Child]:
    """One of them; what it does to this process is undone."""
    threads = torch.get_num_threads()
    try:
        yield cast(Child, InProcess())
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()
