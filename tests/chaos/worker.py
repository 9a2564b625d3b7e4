"""`python -m tests.chaos.worker`: a worker with a clock hours off, and an engine whose figures follow from the job."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, tzinfo
from typing import Any

import optigpu.vocabulary
import worker.context
import worker.execute
from optigpu.documents.events import Event, Finished, Planned, PlannedVariant, VariantFinished, VariantStarted
from optigpu.documents.result import Attribution, Outcome
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.measure import NONE_DONE, Report, never
from optigpu.vocabulary import VariantStatus
from tests.service.records import a_metric, a_result
from worker import __main__ as program

HOURS = "CHAOS_CLOCK_HOURS"
LASTS_S = 0.3
LOOK_EVERY_S = 0.05


def main() -> int:
    """Runs the worker; returns the process's exit status."""
    _set_clock(timedelta(hours=float(os.environ.get(HOURS, "0"))))
    for module, name, other in (
        (worker.execute, "run", run),
        (worker.context, "prove", lambda *_, **__: None),
    ):
        setattr(module, name, other)
    return program.main()


def _set_clock(off: timedelta) -> None:
    """What the machine's clock says to everything that asks Python for the time of day."""
    right = time.time

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + off

    time.time = lambda: right() + off.total_seconds()
    optigpu.vocabulary.datetime = Clock  # type: ignore[attr-defined]


def run(
    spec: JobSpec,
    on_event: Callable[[Event], None],
    *,
    cancelled: Callable[[], str | None] = never,
    done: Mapping[int, Outcome] = NONE_DONE,
) -> Report:
    """What `optigpu.measure.run` does, without measuring."""
    variants = variants_of(spec)
    on_event(
        Planned(variants=tuple(PlannedVariant(index=v.index, role=v.role, label=v.label) for v in variants))
    )
    outcomes, stopped = dict(done), None
    for variant in variants:
        if variant.index not in done and stopped is None:
            on_event(VariantStarted(index=variant.index))
            outcome, stopped = _measured(variant, cancelled)
            outcomes[variant.index] = outcome
            on_event(VariantFinished(outcome=outcome))
    attribution = Attribution(metric="tflops", rows=())
    on_event(Finished(attribution=attribution))
    found = tuple(outcomes[index] for index in sorted(outcomes))
    results = tuple(each.result for each in found if each.result)
    return Report(
        spec=spec,
        results=results,
        outcomes=found,
        attribution=attribution,
        stopped=stopped,
        cancelled=stopped is not None,
    )


def figure(workload: Mapping[str, Any]) -> float:
    """What the engine "measures" of a workload, so that a mix-up of results is seen."""
    made = hashlib.sha256(repr(sorted(workload["sizes"])).encode()).digest()
    return 1.0 + int.from_bytes(made[:4]) / 2**32


def _measured(variant: Variant, cancelled: Callable[[], str | None]) -> tuple[Outcome, str | None]:
    """The outcome, and why the job must stop, if it must. No process is left behind in any case."""
    # Without the site packages a start takes some milliseconds. It ends when its stdin closes, as a real one does.
    program = f"import select, sys; select.select([sys.stdin], [], [], {LASTS_S})"
    with subprocess.Popen([sys.executable, "-S", "-E", "-c", program], stdin=subprocess.PIPE) as child:
        try:
            while child.poll() is None:
                if why := cancelled():
                    return Outcome(index=variant.index, status=VariantStatus.CANCELLED, reason=why), why
                time.sleep(LOOK_EVERY_S)
        finally:
            if child.poll() is None:
                child.kill()
    if child.returncode:
        reason = f"Its process was ended by signal {-child.returncode}."
        return Outcome(index=variant.index, status=VariantStatus.FAILED, reason=reason), None
    workload = variant.workload.model_dump(mode="json")
    value = figure(workload)
    metrics = {"tflops": a_metric("tflops", value, (0.99 * value, 1.01 * value))}
    result = a_result(metrics, index=variant.index, workload="matmul", size=workload["sizes"][0])
    return Outcome(
        index=variant.index, status=VariantStatus.SUCCEEDED, result=result, samples={"tflops": ((value,),)}
    ), None


if __name__ == "__main__":
    sys.exit(main())
