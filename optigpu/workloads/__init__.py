"""The workloads, one file each.

To add one: write its file and name its class in the union. The request's schema and the command line's flags follow.
"""

from collections.abc import Iterable
from typing import Annotated, get_args

from pydantic import Field

from optigpu.vocabulary import Task
from optigpu.workloads.attention import Attention
from optigpu.workloads.base import Workload
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.kernel import Kernel
from optigpu.workloads.kv_cache import KvCachePositions
from optigpu.workloads.matmul import Matmul
from optigpu.workloads.normalization import Normalization
from optigpu.workloads.prefill import Prefill
from optigpu.workloads.quality import Quality
from optigpu.workloads.serve import Serve
from optigpu.workloads.train_step import TrainStep

AnyWorkload = Annotated[
    Generate
    | Prefill
    | KvCachePositions
    | BatchSweep
    | Serve
    | Quality
    | Classify
    | TrainStep
    | Matmul
    | Attention
    | Normalization
    | Kernel,
    Field(discriminator="kind"),
]
"""The union that a request's `workload` is one of; the one list of all workloads."""

WORKLOADS: dict[str, type[Workload]] = {
    member.model_fields["kind"].default: member for member in get_args(get_args(AnyWorkload)[0])
}
"""Every workload's class by its kind."""


def kinds_with(tasks: Iterable[Task]) -> tuple[str, ...]:
    """The kinds of the workloads that have one of these tasks."""
    wanted = set(tasks)
    return tuple(name for name, workload in WORKLOADS.items() if workload.task in wanted)
