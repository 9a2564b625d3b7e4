"""`python -m benchmarks.load --cores 0.5 --pattern bursts`: somebody else's work, of which one knows how much it is.

steady: a short burn in every hundredth of a second. bursts: a whole core for about a second, then rest; in the mean the
same. The bursts are seeded: two processes with one seed burst together. It runs until the process that started it ends
it, or has ended.
"""

import argparse
import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from optigpu.vocabulary import OptiGPUError

NAME = "noise-load"
"""What the processes of the load are called in the kernel's lists, and so in verdicts."""
READY = "ready"
PERIOD_S = 0.01
BURST_S, VARIED = 1.0, 0.5
"""The mean length of a burst; bursts and rests are up to half as much longer or shorter."""
PROGRAM = (sys.executable, "-m", "benchmarks.load")


class Pattern(StrEnum):
    """How the work is spread over time."""

    STEADY = "steady"
    BURSTS = "bursts"


@dataclass(frozen=True)
class Load:
    """The work of others: so many cores in the mean. `nice` is the priority, 19 the lowest."""

    cores: float
    pattern: Pattern = Pattern.STEADY
    nice: int = 0

    @property
    def label(self) -> str:
        """For example "0.5 cores, bursts"."""
        nice = f", nice {self.nice}" if self.nice else ""
        return f"{self.cores:g} core{'s' if self.cores != 1 else ''}, {self.pattern}{nice}"

    @property
    def shares(self) -> tuple[float, ...]:
        """The cores of each process: at most a whole one, and half of one in bursts, so that it rests half the time."""
        most = 0.5 if self.pattern is Pattern.BURSTS else 1.0
        count = math.ceil(self.cores / most)
        return (self.cores / count,) * count


@dataclass
class Running:
    """The processes of a load while it runs."""

    processes: list[psutil.Popen]
    since: float
    before_s: float

    def used_cores(self) -> float:
        """What they really used since they began. Raises OptiGPUError if one of them has ended."""
        if any(process.poll() is not None for process in self.processes):
            raise OptiGPUError("The load program ended before the measurement did: its figures do not count.")
        return (_used_s(self.processes) - self.before_s) / (time.monotonic() - self.since)


@contextmanager
def beside(load: Load, seed: int, program: Sequence[str] = PROGRAM) -> Iterator[Running]:
    """The load runs as long as the block. Raises OptiGPUError if it cannot start."""
    with ExitStack() as stack:
        processes = [stack.enter_context(_started(load, share, seed, program)) for share in load.shares]
        yield Running(processes, time.monotonic(), _used_s(processes))


@contextmanager
def _started(load: Load, share: float, seed: int, program: Sequence[str]) -> Iterator[psutil.Popen]:
    command = [*program, "--cores", str(share), "--pattern", load.pattern, "--nice", str(load.nice)]
    command += ["--seed", str(seed)]
    pipe = subprocess.PIPE
    try:
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        raise OptiGPUError(_failure(f"{error.strerror}: {command[0]}")) from error
    try:
        if process.stdout.readline().strip() != READY:
            raise OptiGPUError(_failure((_end(process).strip() or "it said nothing").splitlines()[-1]))
        yield process
    finally:
        _end(process)


def _end(process: psutil.Popen) -> str:
    """Ends it and returns what it wrote to stderr."""
    with suppress(psutil.NoSuchProcess):
        process.kill()
    return "" if process.stderr.closed else str(process.communicate()[1])


def _failure(why: str) -> str:
    return f"The load program could not start ({why.removesuffix('.')}), so nothing was measured."


def _used_s(processes: Sequence[psutil.Popen]) -> float:
    spent = [process.cpu_times() for process in processes]
    return float(sum(times.user + times.system for times in spent))


def main() -> int:
    """Works and rests until it is killed or orphaned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--cores", type=_share, required=True, help="of one core, above 0 and at most 1")
    parser.add_argument("--pattern", type=Pattern, choices=list(Pattern), default=Pattern.STEADY)
    parser.add_argument("--seed", type=int, default=0, help="of the bursts")
    parser.add_argument("--nice", type=int, default=0, help="priority; 19 is the lowest")
    options = parser.parse_args()
    if options.nice:
        os.setpriority(os.PRIO_PROCESS, 0, options.nice)
    Path("/proc/self/comm").write_text(NAME)
    parent = os.getppid()
    print(READY, flush=True)
    due = time.monotonic()
    for burn_s, rest_s in schedule(options.pattern, options.cores, options.seed):
        if os.getppid() != parent:
            break
        _burn(burn_s)
        # What a crowded machine has delayed is not made up for: the load would never rest again.
        due = max(due + burn_s + rest_s, time.monotonic())
        if rest_s:
            time.sleep(due - time.monotonic() if due > time.monotonic() else 0)
    return 0


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share of one core, above 0 and at most 1")
    return share


def schedule(pattern: Pattern, cores: float, seed: int) -> Iterator[tuple[float, float]]:
    """Seconds of work and of rest, again and again, of one process."""
    if pattern is Pattern.STEADY:
        yield from itertools.repeat((cores * PERIOD_S, (1 - cores) * PERIOD_S))
    rng = random.Random(seed)
    yield 0.0, _varied(rng, BURST_S)  # so that not every measurement begins with a burst
    while True:
        yield _varied(rng, BURST_S), _varied(rng, BURST_S * (1 - cores) / cores)


def _varied(rng: random.Random, mean_s: float) -> float:
    return mean_s * rng.uniform(1 - VARIED, 1 + VARIED)


def _burn(seconds: float) -> None:
    """Uses so much CPU time, however long that takes."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        for _ in range(500):
            pass


if __name__ == "__main__":
    sys.exit(main())
