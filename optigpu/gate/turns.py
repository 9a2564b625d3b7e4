"""Runs the commands of two states by turns until the pairs of their figures allow a verdict, or the time is up."""

import math
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from optigpu.documents.gates import MOST_PAIRS, GateOutcome, GateVerdict
from optigpu.gate.decision import FEWEST_FOR_NOISE, chance_of, loss_of, verdict_of
from optigpu.gate.figures import FigureError, Wanted, figure_in
from optigpu.vocabulary import Better, CancelledError, OptiGPUError

STATUS = {GateVerdict.NO_WORSE: 0, GateVerdict.WORSE: 1, GateVerdict.CANNOT_SAY: 2}
"""The exit status of each verdict."""
LONGEST_RUN = 0.25
"""The share of the time that one run may take: with longer ones no verdict would be possible."""
STEP_S = 0.1
_READ_BYTES = 2**20
_QUOTED_LINES, _QUOTED_CHARACTERS = 4, 400

Stop = Callable[[], str | None]
"""The reason to stop, if there is one."""


class GateError(OptiGPUError):
    """A command or a build failed, so that nothing can be compared."""


@dataclass(frozen=True)
class Side:
    """One of the two states: a command, where and in which environment it runs, and what names the state exactly."""

    label: str
    name: str
    command: str
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status (None: it was killed at its bound), stdout, what it printed last, its seconds."""

    status: int | None
    out: str
    last: str
    seconds: float


@dataclass(frozen=True)
class Rules:
    """What is compared, by which limit (0.03: 3%), in how much time; `seed` draws the order within each pair."""

    wanted: Wanted
    worse_than: float
    time_s: float
    seed: int

    @property
    def limit(self) -> float:
        """The loss at the limit, as a logarithm."""
        return abs(float(np.log1p(-self.worse_than if self.is_rate else self.worse_than)))

    @property
    def is_rate(self) -> bool:
        return self.wanted.better is Better.HIGHER

    def share(self, loss: float) -> float:
        """A loss, which is a logarithm, as a share of the base's figure."""
        return float(-np.expm1(-loss) if self.is_rate else np.expm1(loss))


def compare(base: Side, head: Side, rules: Rules, stop: Stop, tell: Callable[[float], None]) -> GateOutcome:
    """Runs each once to warm up, then pairs of both. `tell` hears the share of the time that has passed. Raises
    GateError if a command fails or prints no figure, CancelledError when it is stopped."""
    begun = time.monotonic()
    until = begun + rules.time_s
    order = random.Random(rules.seed)
    for side in (base, head):
        if _figure(side, rules, until, stop) is None:
            raise GateError(f"The time was up before {side.label} had run once; raise --minutes.")
    pairs: list[tuple[float, float]] = []
    first, planned, verdict = time.monotonic(), MOST_PAIRS, GateVerdict.CANNOT_SAY
    while verdict is GateVerdict.CANNOT_SAY and len(pairs) < planned:
        figures = {side is head: _figure(side, rules, until, stop) for side in order.sample((base, head), 2)}
        ours, theirs = figures[False], figures[True]
        if ours is None or theirs is None:
            break
        pairs.append((ours, theirs))
        count, now = len(pairs), time.monotonic()
        if count >= FEWEST_FOR_NOISE:
            planned = min(planned, count + int(max(0.0, until - now) / ((now - first) / count)))
        tell((now - begun) / rules.time_s)
        verdict = verdict_of(_losses(pairs, rules), planned, rules.limit)
    if not pairs:
        raise GateError("The time was up before one pair had run; raise --minutes.")
    if verdict is GateVerdict.CANNOT_SAY:
        planned = len(pairs)  # the time is up: this is the last look
    verdict = verdict_of(_losses(pairs, rules), planned, rules.limit)
    found = loss_of(_losses(pairs, rules), planned, rules.limit)
    loss, low, high = map(rules.share, (found.estimate, found.low, found.high))
    sign = -1 if rules.is_rate else 1
    sides = tuple(zip(*pairs, strict=True))
    return GateOutcome(
        verdict=verdict,
        exit_status=STATUS[verdict],
        metric=rules.wanted.metric or "seconds",
        better=rules.wanted.better,
        worse_than=rules.worse_than,
        ratio=1 + sign * loss,
        ratio_ci=(1 + min(sign * low, sign * high), 1 + max(sign * low, sign * high))
        if found.known
        else None,
        loss=loss,
        loss_ci=(low, high) if found.known else None,
        smallest_loss_found=None if found.findable is None else rules.share(found.findable),
        chance=chance_of(_losses(pairs, rules), planned),
        base=base.label,
        head=head.label,
        base_figures=sides[0],
        head_figures=sides[1],
        seconds=time.monotonic() - begun,
        minutes=rules.time_s / 60,
    )


def _losses(pairs: list[tuple[float, float]], rules: Rules) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    base, head = np.log(np.array(pairs)).T
    return np.asarray(base - head if rules.is_rate else head - base)


def _figure(side: Side, rules: Rules, until: float, stop: Stop) -> float | None:
    """The figure of one run; None if the time was up before it ended. Raises GateError."""
    bound = rules.time_s * LONGEST_RUN
    left = until - time.monotonic()
    if left <= 0:
        return None
    ended = run_bounded(side, min(bound, left), stop)
    if ended.status is None:
        if left <= bound:
            return None
        raise GateError(
            f"The command of {side.label} did not end within {bound:.3g} s, a quarter of the time, and was killed; "
            f"make it shorter or raise --minutes.{quoted(ended.last)}"
        )
    if ended.status:
        raise GateError(
            f"The command of {side.label} ended with exit status {ended.status}; mend it first.{quoted(ended.last)}"
        )
    try:
        return ended.seconds if rules.wanted.metric is None else figure_in(ended.out, rules.wanted.metric)
    except FigureError as error:
        raise GateError(f"The command of {side.label} {error}.{quoted(ended.last)}") from None


def run_bounded(side: Side, seconds: float, stop: Stop) -> Ended:
    """Runs a command by the shell in a process group of its own, which is killed at the bound and at the end. Raises
    GateError if it cannot be started, CancelledError when it is stopped."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begun = time.perf_counter()
        try:
            process = subprocess.Popen(
                side.command, shell=True, executable="/bin/bash" if Path("/bin/bash").exists() else None,
                cwd=side.folder, env=os.environ | side.variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise GateError(f"The command of {side.label} cannot be started: {error.strerror}.") from None
        ending = _Ending(process)
        try:
            while ending.is_alive() and time.perf_counter() < begun + seconds:
                ending.join(max(0.0, min(STEP_S, begun + seconds - time.perf_counter())))
                if reason := stop():
                    raise CancelledError(reason)
            status = None if ending.is_alive() else process.returncode
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            ending.join()
        printed = _end_of(out)
        return Ended(status, printed, _end_of(err).strip() or printed.strip(), ending.at - begun)


class _Ending(threading.Thread):
    """Waits for a process and keeps the moment of its end: `wait` with a timeout would see it up to 50 ms later."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(daemon=True)
        self._process = process
        self.at = math.inf
        self.start()

    def run(self) -> None:
        self._process.wait()
        self.at = time.perf_counter()


def _end_of(file: BinaryIO) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _READ_BYTES))
    return file.read().decode(errors="replace")


def quoted(printed: str) -> str:
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()][-_QUOTED_LINES:]
    text = "\n  ".join(lines)[-_QUOTED_CHARACTERS:]
    return f" It printed at last:\n  {text}" if text else " It printed nothing."
