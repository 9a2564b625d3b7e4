"""python -m optigpu.child.largest_batch: runs requests of growing batches under a limit of memory.

Its first line on stdin is a job as JSON, with `limit_bytes`; each further line is a batch size. It answers each with
one line: "fits", "out of memory", or an error's sentence. The first answer, "ready", comes when the model is loaded.
"""

import gc
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from optigpu.backends import BACKENDS
from optigpu.backends.base import Backend, Order
from optigpu.backends.runtime import Runtime
from optigpu.hardware import probe
from optigpu.hardware.cpu import cpu_cores
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.vocabulary import OptiGPUError
from optigpu.workloads.base import Workload

READY, FITS, OUT_OF_MEMORY = "ready", "fits", "out of memory"


def main() -> None:
    """Answers until stdin ends; what libraries print goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    asked = json.loads(sys.stdin.readline())
    limit_bytes = int(asked.pop("limit_bytes"))
    (variant,) = variants_of(JobSpec.model_validate(asked))
    backend = BACKENDS[variant.backend]
    made: list[Runtime] = []
    with tempfile.TemporaryDirectory() as folder:
        said = _attempt(backend, lambda: made.append(_prepared(variant, limit_bytes, Path(folder))))
        _say(answers, READY if said == FITS else said)
        for line in sys.stdin:
            workload: Workload = variant.workload.model_copy(update={"batch_size": int(line)})
            _say(answers, _attempt(backend, lambda: workload.prepare(made[0]).run()))  # noqa: B023 - runs at once


def _prepared(variant: Variant, limit_bytes: int, folder: Path) -> Runtime:
    """The model with the stack applied, loaded under the limit: what Python and torch take before does not count."""
    from optigpu.backends.torch.memory import limit_memory

    backend = BACKENDS[variant.backend]
    backend.use_threads(cpu_cores())
    backend.start(model=True)
    limit_memory(variant.device, limit_bytes)
    order = Order(
        model=variant.model,
        stack=variant.stack,
        workload=variant.workload,
        device=variant.device,
        seed=0,
        threads=cpu_cores(),
        folder=folder,
        environment=probe(),
    )
    return backend.prepare(order, _ignore)


def _attempt(backend: Backend, run: Callable[[], object]) -> str:
    """What became of it; the memory of an attempt that failed is free afterwards."""
    try:
        run()
    except Exception as error:
        if isinstance(error, MemoryError) or backend.is_out_of_memory(error) or "bad_alloc" in str(error):
            return OUT_OF_MEMORY
        return str(error) if isinstance(error, OptiGPUError) else f"{type(error).__name__}: {error}"
    finally:
        gc.collect()
    return FITS


def _say(answers: TextIO, text: str) -> None:
    print(" ".join(text.split()), file=answers, flush=True)


def _ignore(doing: str) -> None:
    """Progress is not shown."""


if __name__ == "__main__":
    main()
