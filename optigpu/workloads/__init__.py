"""The workloads, one file each.

To add one: write its file and name its class in the union.
"""

from typing import Annotated, get_args

from pydantic import Field

from optigpu.workloads.base import Workload
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul

AnyWorkload = Annotated[Generate | Matmul, Field(discriminator="kind")]
"""The union that a request's `workload` is one of; the one list of all workloads."""

WORKLOADS: dict[str, type[Workload]] = {
    member.model_fields["kind"].default: member for member in get_args(get_args(AnyWorkload)[0])
}
"""Every workload's class by its kind."""
