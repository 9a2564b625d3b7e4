"""Which stack to use, from what the service's database has."""

from pydantic import JsonValue

from optigpu.documents.views import WorkerView
from optigpu.fit.advice import Evidence, best_measured, evidence_of
from optigpu.job.spec import JobSpec
from optigpu.store import results, workers
from optigpu.store.database import Session

WHERE = "this service"


def advice_for(
    session: Session, spec: JobSpec, hardware: str | None, max_kld: float | None
) -> dict[str, JsonValue]:
    """The best measured stack on a class of hardware, or what to post where nothing was measured there.

    Without `hardware` it is that of a worker, or else that of the newest result. Versions are those of the class's
    worker, or else those of its newest result.
    """
    evidence = evidence_of(results.of_workload(session, spec.workload.kind, spec.model), spec, WHERE)
    place = _place(workers.list_(session), evidence, hardware)
    if place is not None:
        name, software = place
        advice = best_measured(evidence, spec, name, software, max_kld=max_kld)
        if advice is not None:
            return advice.model_dump(mode="json")
    ladder = {"workload": spec.workload.model_dump(mode="json"), "model": spec.model, "plan": "ladder"}
    where = place[0] if place else hardware or "any hardware"
    return {
        "basis": "none",
        "reason": f"Nothing of this workload was measured on {where} with today's versions; post this job.",
        "job": ladder | {"stack": [{"name": "bf16"}, {"name": "int8_weight_only"}]},
    }


def _place(
    known: list[WorkerView], evidence: list[Evidence], hardware: str | None
) -> tuple[str, dict[str, str]] | None:
    """A class of hardware whose name has that part, and its software."""

    def fits(name: str) -> bool:
        return hardware is None or hardware.lower() in name.lower()

    serving = [worker for worker in known if fits(worker.hardware_class)]
    for worker in sorted(serving, key=lambda each: each.alive, reverse=True):
        if worker.software:
            return worker.hardware_class, worker.software
    return next(((each.hardware, each.versions) for each in evidence if fits(each.hardware)), None)
