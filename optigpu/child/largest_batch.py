"""python -m optigpu.child.largest_batch: runs requests of growing batches under a limit of memory.

It reads an `Assignment`, loads its model under the variant's limit and answers `BatchesReady`; then it answers each
`TryBatch` with `BatchTried` or `Broken`, as `optigpu.child.connection` says. It goes on after memory ran out.
"""

import gc
from collections.abc import Callable
from typing import NoReturn

from optigpu.backends import BACKENDS
from optigpu.backends.runtime import Runtime
from optigpu.child.connection import broken, connect
from optigpu.child.messages import (
    Answer,
    Assignment,
    BatchesReady,
    BatchTried,
    Broken,
    Progress,
    Refused,
    TryBatch,
)
from optigpu.child.replicate import order_of, refusal
from optigpu.documents.facts import RunFacts
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Workload


def main() -> NoReturn:
    """Loads the model, then tries batches for ever: the thread that reads stdin ends the process."""
    lines, tell = connect()
    assignment = Assignment.model_validate_json(lines.get())
    made: list[Runtime] = []

    def load() -> Answer:
        # The model is loaded under the limit: what Python and torch take before does not count.
        from optigpu.backends.torch.device import limit_memory

        variant, order = assignment.variant, order_of(assignment)
        reason = refusal(assignment)
        if reason:
            raise UnsupportedError(reason)
        assert variant.memory_limit_bytes is not None
        backend = BACKENDS[variant.backend]
        backend.use_threads(order.threads)
        backend.start(model=True)
        limit_memory(variant.device, variant.memory_limit_bytes)
        made.append(backend.prepare(order, lambda doing: tell(Progress(doing=doing))))
        facts = made[0].notes.facts | {"weights": made[0].weights()}
        return BatchesReady(facts=RunFacts.gathered(facts))

    def attempt() -> Answer:
        order = TryBatch.model_validate_json(lines.get())
        workload: Workload = assignment.variant.workload.model_copy(update={"batch_size": order.batch_size})
        workload.prepare(made[0]).run()
        return BatchTried(fits=True)

    tell(_attempted(load))
    while True:
        said = _attempted(attempt)
        if isinstance(said, Broken) and said.fault == "out_of_memory":
            said = BatchTried(fits=False, why=said.reason)
        tell(said)


def _attempted(attempt: Callable[[], Answer]) -> Answer:
    """What became of it; the memory of an attempt that failed is free afterwards."""
    try:
        return attempt()
    except UnsupportedError as error:
        return Refused(reason=str(error))
    except Exception as error:
        # C++'s error for an allocation that failed, and CPython's for one that failed in an import.
        is_of_memory = "bad_alloc" in str(error) or isinstance(error, SystemError)
        said = broken(error)
        return said.model_copy(update={"fault": "out_of_memory"}) if is_of_memory else said
    finally:
        gc.collect()


if __name__ == "__main__":
    main()
