"""The answers of code that somebody brought, judged from outside of the process that runs it.

The conductor chooses the seeds, and sends each to that process first: the reference's answers exist nowhere until those
to be judged have been read, and then another process computes them. Both are timed by the conductor's clock, from the
command until it has read all bytes of the answers; what the reference takes beside its calls is what reading costs. So
that nothing is computed before the command, the time in which inputs are drawn is compared as well.
"""

import hashlib
import math
import os
import secrets
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optigpu.child.messages import CallsDigest, CallsDone, CallsDrawn, DigestCalls, DrawCalls, RunCalls
from optigpu.conductor.processes.child import Child, Watch, ask
from optigpu.conductor.processes.rounds import rest_of
from optigpu.documents.facts import AnswerPart, Answers, KernelFacts
from optigpu.vocabulary import ReplicateError
from optigpu.workloads.kernel import Kernel

CHECKS, CHECKED_CALLS = 3, 2
"""Before anything is timed, the answers to so many seeds are compared, of so many calls each."""
WINDOWS, WINDOW_S, PATIENCE_S = 3, 0.1, 10.0
"""The fastest of at least so many windows counts, each of calls that take the reference about so long. A disturbed one
is longer and never shorter, so that more are measured for so long."""
ANSWERED_RATIO, READING_SHARE = 1.5, 0.1
"""A call whose answer is read may take so many times what it is said to take, and so much more of the time that reading
takes. Of the time that drawing takes the same share is left out."""
WINDOW_BYTES, LARGEST_BYTES = 2**24, 2**30
"""Of the answers in a window, where one call has not more; and the most of all."""
TOLERANCES = {"float64": 1e-4, "float32": 1e-4, "float16": 8 * 2.0**-11, "bfloat16": 8 * 2.0**-8}
"""The largest error of an element, as a share of its size and the root mean square of its tensor: 8 times the unit
roundoff of 16 bits, of float32 what sums of millions in another order make. Whole numbers must be equal."""
STORED = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2", "bool": "?", "uint8": "u1", "int8": "i1",
    "int16": "<i2", "int32": "<i4", "int64": "<i8",
}  # fmt: skip

Wide = NDArray[np.float64]


@dataclass(frozen=True)
class Window:
    """What one process answered, the seconds until all of it was read, and those in which inputs were drawn."""

    answers: Answers
    content: bytes
    seconds: float
    drawing_s: float

    def tensors(self, call: int) -> list[Wide]:
        """The tensors of one answer, and the inputs after it where they were asked for, flat."""
        parts = (*self.answers.parts, *self.answers.inputs)
        at, found = call * sum(map(_bytes, parts)), []
        for part in parts:
            stored = np.frombuffer(self.content, STORED[part.dtype], math.prod(part.shape), at)
            at += _bytes(part)
            if part.dtype == "bfloat16":  # the upper half of a float32
                stored = (stored.astype("<u4") << 16).view("<f4")
            found.append(stored.astype(np.float64))
        return found


@dataclass(frozen=True)
class AnswerCheck:
    """The comparison of one process with the reference's."""

    child: Child
    referee: Child
    workload: Kernel  # that is judged
    folder: Path
    progress: Watch

    def check(self) -> KernelFacts:
        """Compares answers to seeds that nobody knew, and inputs that must have stayed as they were. Raises
        ReplicateError for wrong ones, and for a reference that gives the same answer to everything."""
        (inputs,), (dtype,) = self.workload.described_cases, self.workload.dtypes
        found = KernelFacts(inputs=inputs, dtype=dtype, tolerance=TOLERANCES[dtype])
        answers: set[bytes] = set()
        for number in range(CHECKS):
            seed, with_inputs = secrets.randbits(32), number == 0
            ours, theirs = (
                self._window(each, seed, CHECKED_CALLS, with_inputs=with_inputs)
                for each in (self.child, self.referee)
            )
            found = self._compared(found, ours, theirs, range(theirs.answers.calls))
            answers.add(hashlib.sha256(theirs.content[: sum(map(_bytes, theirs.answers.parts))]).digest())
        if len(answers) == 1:
            raise ReplicateError(
                "The reference gives the same answer to other inputs, so that no answer can be checked; let it depend "
                "on its inputs."
            )
        return found

    def timed(self, found: KernelFacts, told_s: float, reference_s: float | None) -> KernelFacts:
        """With the seconds of a call from outside: by the fastest window, of as many as are needed until it agrees with
        `told_s`, which its rounds say, or of PATIENCE_S. `reference_s` is what the reference's rounds say, if it had
        any: where its calls in a window take longer, for a reason that is not the code's, so may those of the code.
        Raises ReplicateError for wrong answers."""
        ours, theirs, calls = list[Window](), list[Window](), CHECKED_CALLS
        began = time.monotonic()
        for number in count():
            seed = secrets.randbits(32)
            for child, windows in ((self.child, ours), (self.referee, theirs)):
                windows.append(self._window(child, seed, calls))
                rest_of(child.pid)
            last = theirs[-1].answers
            found = self._compared(found, ours[-1], theirs[-1], [secrets.randbelow(last.calls)])
            if number == 0:  # shows how long a call takes and an answer is
                size = sum(map(_bytes, last.parts))
                by_time = int(WINDOW_S * last.calls / max(last.seconds, 1e-9))
                calls = max(1, min(by_time, WINDOW_BYTES // max(1, size)))
                ours, theirs = [], []
                continue
            reading_s = min(each.seconds - each.answers.seconds for each in theirs) / last.calls
            drawing_s = min(each.drawing_s for each in theirs) / last.calls
            window_s = min(each.answers.seconds for each in theirs) / last.calls
            answered_s = min(each.seconds for each in ours) / last.calls - reading_s
            whole_s = min(each.seconds + each.drawing_s for each in ours) / last.calls - reading_s
            outside_s = max(0.0, answered_s, whole_s - (1 + READING_SHARE) * drawing_s)
            colder = max(1.0, window_s / reference_s) if reference_s else 1.0
            found = found.model_copy(update={"outside_s": outside_s / colder, "reading_s": reading_s})
            is_over = not is_later(found, told_s) or time.monotonic() - began > PATIENCE_S
            if number >= WINDOWS and is_over:
                break
        return found

    def _window(self, child: Child, seed: int, calls: int, *, with_inputs: bool = False) -> Window:
        file = self.folder / f"answers-{child.pid}"
        asked = time.perf_counter()
        drawn = ask(child, DrawCalls(seed=seed, calls=calls), CallsDrawn, self.progress).calls
        order = RunCalls(calls=drawn, file=str(file), with_inputs=with_inputs)
        began = time.perf_counter()
        answers = ask(child, order, CallsDone, self.progress).answers
        content = _read(file, answers)
        found = Window(answers, content, time.perf_counter() - began, began - asked)
        if child is self.referee:
            told = ask(child, DigestCalls(), CallsDigest, self.progress).sha256
            if hashlib.sha256(content).hexdigest() != told:
                raise ReplicateError("Somebody changed the reference's answers before they were read.")
        return found

    def _compared(
        self, found: KernelFacts, ours: Window, theirs: Window, calls: Sequence[int]
    ) -> KernelFacts:
        """With these answers as well. Raises ReplicateError for wrong ones."""
        told, expected = ours.answers, theirs.answers
        if (told.calls, told.parts, told.inputs) != (expected.calls, expected.parts, expected.inputs):
            raise self._wrong(f"it returned {_told(told)}, and the reference {_told(expected)}")
        worst, outputs = found.error, len(expected.parts)
        for call in calls:
            got, right = ours.tensors(call), theirs.tensors(call)
            for place, part in enumerate(expected.parts):
                allowed = max(found.tolerance, TOLERANCES[part.dtype]) if part.dtype in TOLERANCES else 0.0
                error = _error(got[place], right[place], is_float=part.dtype in TOLERANCES)
                if not error <= allowed:
                    raise self._wrong(_off(place, outputs, error, allowed))
                worst = max(worst, error)
            for place, pair in enumerate(zip(got[outputs:], right[outputs:], strict=True)):
                if not np.array_equal(*pair, equal_nan=True):
                    raise self._wrong(f"it changed its tensor {place}, and must leave inputs as they are")
        return found.model_copy(update={"error": worst, "answers": found.answers + len(calls)})

    def _wrong(self, why: str) -> ReplicateError:
        return ReplicateError(f"Wrong answers ({self.workload.label}): {why}.")


def is_later(found: KernelFacts, told_s: float) -> bool:
    """Whether calls take longer by the conductor's clock than their process says."""
    if found.outside_s is None or found.reading_s is None:
        return False
    return found.outside_s > ANSWERED_RATIO * told_s + READING_SHARE * found.reading_s


def _off(place: int, outputs: int, error: float, allowed: float) -> str:
    of = f"output {place}" if outputs > 1 else "the output"
    if not math.isfinite(error):
        return f"an element of {of} differs from the reference's, and one of the two is NaN, infinite or a whole number"
    return f"an element of {of} is off by {error:.2g} of its size, and at most {allowed:.2g} is allowed"


def _error(got: Wide, right: Wide, *, is_float: bool) -> float:
    """The largest of any element; infinite where NaN, infinities or whole numbers are others."""
    finite = np.isfinite(right)
    if not is_float or not np.array_equal(got[~finite], right[~finite], equal_nan=True):
        return 0.0 if np.array_equal(got, right, equal_nan=True) else math.inf
    got, right = got[finite], right[finite]
    if not right.size:
        return 0.0
    size = np.abs(right) + math.sqrt(float(np.mean(np.square(right))))
    off = np.abs(got - right)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(off == 0, 0.0, off / size)
    largest = float(np.max(shares))
    return math.inf if math.isnan(largest) else largest


def _told(answers: Answers) -> str:
    parts = [f"{part.dtype} [{', '.join(map(str, part.shape))}]" for part in answers.parts]
    return f"{len(parts)} tensor{'s' if len(parts) != 1 else ''} ({'; '.join(parts)})"


def _bytes(part: AnswerPart) -> int:
    if part.dtype not in STORED:
        raise ReplicateError(
            f"An answer in {part.dtype} cannot be compared; the valid ones are {', '.join(STORED)}."
        )
    return math.prod(part.shape) * np.dtype(STORED[part.dtype]).itemsize


def _read(file: Path, answers: Answers) -> bytes:
    """What the process has written. It may be anything, by anybody: a link, a pipe, or other bytes than it told of."""
    size = answers.calls * sum(map(_bytes, (*answers.parts, *answers.inputs)))
    if size > LARGEST_BYTES:
        raise ReplicateError(f"Answers of {size} bytes are too long to be compared; ask for a smaller case.")
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            about = os.fstat(descriptor)
            content = opened.read(size) if stat.S_ISREG(about.st_mode) and about.st_size == size else b""
    except OSError:
        content = b""
    if len(content) != size:
        raise ReplicateError("The measuring process left other answers than those that it told of.")
    return content
