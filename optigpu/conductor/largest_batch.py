"""The largest batch that fits under a limit of memory, found by bisection with processes that really run out of it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from optigpu.child.largest_batch import FITS, OUT_OF_MEMORY, READY
from optigpu.fit.fitting import largest
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import Frozen, ReplicateError

PROGRAM = (sys.executable, "-P", "-m", "optigpu.child.largest_batch")
MOST = 4096
EACH_ON_ITS_OWN = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc maps every tensor by itself and gives it back when it is freed: what an attempt leaves behind would else count
against the next one (man 3 mallopt)."""


class LargestBatch(Frozen):
    """The largest batch of a stack, 0 where not even one fits; `tried` has every attempt in order.

    `restarts` counts processes that died of an attempt instead of recovering from it.
    """

    label: str
    limit_bytes: int
    largest: int
    tried: tuple[tuple[int, bool], ...]
    restarts: int = 0


def largest_batch(
    spec: JobSpec, limit_bytes: int, most: int = MOST, program: Sequence[str] = PROGRAM
) -> LargestBatch:
    """Doubles the batch of the job's workload until memory runs out, then bisects.

    The limit holds for what is taken after the libraries are loaded: weights, states, activations. On a CPU the kernel
    enforces it (RLIMIT_DATA), on a GPU torch's allocator. Raises ReplicateError where a request fails for another
    reason, such as a batch that the workload does not take.
    """
    tried: dict[int, bool] = {}
    with _Attempts(spec, limit_bytes, program) as attempts:

        def fits(batch: int) -> bool:
            if batch not in tried:
                tried[batch] = attempts.fits(batch)
            return tried[batch]

        bound = 1
        while bound < most and fits(bound):
            bound = min(2 * bound, most)
        found = largest(fits, 1, bound)
        restarts = attempts.restarts
    label = " + ".join(technique.name for technique in spec.stack) or "baseline"
    return LargestBatch(
        label=label, limit_bytes=limit_bytes, largest=found, tried=tuple(tried.items()), restarts=restarts
    )


class _Attempts:
    """A process that tries batches; another one takes its place when it dies."""

    def __init__(self, spec: JobSpec, limit_bytes: int, program: Sequence[str]) -> None:
        self._order = json.dumps(spec.model_dump(mode="json") | {"limit_bytes": limit_bytes})
        self._program = program
        self._process: subprocess.Popen[str] | None = None
        self.restarts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def fits(self, batch: int) -> bool:
        """Whether a request of that batch finds enough memory. Raises ReplicateError if it fails for another reason."""
        answer = READY if self._process else self._start()
        if answer == READY:
            answer = self._ask(str(batch))
        if answer not in (FITS, OUT_OF_MEMORY, ""):
            raise ReplicateError(f"A batch of {batch} failed: {answer}")
        if not answer:  # the process died: it could not even report
            self._end()
            self.restarts += 1
        return answer == FITS

    def _start(self) -> str:
        self._process = subprocess.Popen(
            self._program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | EACH_ON_ITS_OWN,
        )
        said = self._ask(self._order)
        if said == OUT_OF_MEMORY:
            self._end()
        return said

    def _ask(self, line: str) -> str:
        """The answer to a line; empty where the process has died."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()
        except BrokenPipeError:
            return ""

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
