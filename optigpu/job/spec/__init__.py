"""A job as it is posted: what it asks for, and the variants that it is made of. Errors of the request itself are found
here; a problem of the machine ends only the variant that it concerns."""

from optigpu.job.spec.conditions import JobTarget, Limits, Measure
from optigpu.job.spec.job_spec import Beside, JobSpec
from optigpu.job.spec.stack import PlanName, Tag, resolve
from optigpu.job.spec.variant import LARGEST_BATCH, Variant, digest, expand_workload

__all__ = [
    "LARGEST_BATCH",
    "Beside",
    "JobSpec",
    "JobTarget",
    "Limits",
    "Measure",
    "PlanName",
    "Tag",
    "Variant",
    "digest",
    "expand_workload",
    "resolve",
]
