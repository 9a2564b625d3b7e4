"""How long a job will take by its plan, before anything of it is measured."""

from collections.abc import Sequence

from optigpu.documents.events import Estimated
from optigpu.job import batch_scaling, search
from optigpu.job.estimate import Plan, plan_time
from optigpu.job.spec import JobSpec, PlanName, Variant


def foreseen(spec: JobSpec, variants: Sequence[Variant]) -> tuple[Plan, Estimated]:
    """What the session begins with, and the event that tells how long all of it takes.

    Raises SpecError if the job's limit is too short for its least.
    """
    if spec.plan is PlanName.SEARCH:
        return search.first_round(spec, variants), search.estimated(spec, variants)
    if spec.plan is PlanName.BATCH_SCALING:
        return batch_scaling.guessed(spec, variants)
    plan = plan_time(spec, variants)
    return plan, plan.estimated()
