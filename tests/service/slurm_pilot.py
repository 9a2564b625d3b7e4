"""`python -m tests.service.slurm_pilot --once --job ID`: the pilot, with an engine that is fast and always right."""

import sys
from collections.abc import Callable, Mapping

import worker.context
import worker.execute
from optigpu.documents.events import Event, VariantFinished, VariantStarted
from optigpu.documents.result import Outcome
from optigpu.hardware import probe
from optigpu.job.measured import summary_of
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.measure import NONE_DONE, Report, never
from tests.chaos import worker as engine
from worker import __main__ as program

_PRODUCT = JobSpec.model_validate({"workload": {"kind": "matmul", "sizes": [64]}})


def run(
    spec: JobSpec,
    on_event: Callable[[Event], None],
    *,
    cancelled: Callable[[], str | None] = never,
    done: Mapping[int, Outcome] = NONE_DONE,
) -> Report:
    """The chaos test's engine, whose variants last as many seconds as the job's note says, one after the other."""
    lasting = [float(each) for each in (spec.note or "0.05").split(",")]

    def listen(event: Event) -> None:
        if isinstance(event, VariantStarted):
            engine.LASTS_S = lasting[event.index]
        on_event(_of_this_job(event, spec) if isinstance(event, VariantFinished) else event)

    return engine.run(spec, listen, cancelled=cancelled, done=done)


def _products(spec: JobSpec) -> list[Variant]:
    """The job's variants, each as the matrix product that the engine knows."""
    return [variant.model_copy(update={"workload": _PRODUCT.workload}) for variant in variants_of(spec)]


def _of_this_job(event: VariantFinished, spec: JobSpec) -> VariantFinished:
    """With what the plan says of the variant, which the service checks, and the machine's environment."""
    result = event.outcome.result
    if result is None:
        return event
    changed = {"variant": summary_of(variants_of(spec)[event.outcome.index]), "environment": probe()}
    outcome = event.outcome.model_copy(update={"result": result.model_copy(update=changed)})
    return VariantFinished(outcome=outcome)


def main() -> int:
    """Runs the pilot; returns the process's exit status."""
    for module, name, other in (
        (engine, "variants_of", _products),
        (worker.execute, "run", run),
        (worker.context, "prove", lambda *_, **__: None),
    ):
        setattr(module, name, other)
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
