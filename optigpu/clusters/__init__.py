"""What a cluster's scheduler is asked to run for a job: a batch script, made without asking anybody."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from optigpu.clusters import slurm
from optigpu.clusters.task import Task as Task
from optigpu.clusters.task import dry_task as dry_task
from optigpu.vocabulary import Scheduler

SCRIPTS: Mapping[Scheduler, Callable[[Task], str]] = MappingProxyType({Scheduler.SLURM: slurm.script})
"""By its scheduler what makes the text that is submitted."""
