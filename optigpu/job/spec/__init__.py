"""A job as it is posted: what it asks for, and the variants that it is made of. Errors of the request itself are found
here; a problem of the machine ends only the variant that it concerns."""

from optigpu.job.spec.job_spec import Beside as Beside
from optigpu.job.spec.job_spec import JobSpec as JobSpec
from optigpu.job.spec.job_spec import JobTarget as JobTarget
from optigpu.job.spec.job_spec import Limits as Limits
from optigpu.job.spec.job_spec import Measure as Measure
from optigpu.job.spec.stack import PlanName as PlanName
from optigpu.job.spec.stack import Tag as Tag
from optigpu.job.spec.stack import resolve as resolve
from optigpu.job.spec.variant import LARGEST_BATCH as LARGEST_BATCH
from optigpu.job.spec.variant import Variant as Variant
from optigpu.job.spec.variant import digest as digest
from optigpu.job.spec.variant import expand_workload as expand_workload
