"""The kernels of a request: a table, and the shares of kernel time that are bound by memory and by arithmetic."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optigpu.documents.roofline import Bound

TABLE_ROWS = 20


@dataclass(frozen=True)
class Kernel:
    """One that ran: an operator's own time on a CPU, a kernel on a GPU.

    `weight` is the number of equal kernels in the whole request that it represents, `in_steps` whether it is part of a
    decode step. `read_bytes` are those of its inputs, and `flops` its operations; None where the profiler does not tell
    them, as for one of several kernels that an operator launches.
    """

    name: str
    seconds: float
    bound: Bound | None
    weight: float
    in_steps: bool
    read_bytes: int | None = None
    flops: int | None = None

    @property
    def weighted_s(self) -> float:
        """Seconds of all the kernels that it represents."""
        return self.seconds * self.weight


def table(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Those that take the most time: calls and seconds as recorded, the share of the whole request's kernel time."""
    groups: dict[tuple[str, Bound | None], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.name, kernel.bound), []).append(kernel)
    total_s = _seconds(kernels)
    largest = sorted(groups.items(), key=lambda group: -_seconds(group[1]))[:TABLE_ROWS]
    return [
        {
            "name": name,
            "calls": len(group),
            "self_s": sum(kernel.seconds for kernel in group),
            "share": _seconds(group) / total_s,
            "bound": bound,
        }
        for (name, bound), group in largest
    ]


def share(kernels: Sequence[Kernel], bound: Bound | None) -> float:
    """The share of the request's kernel time that `bound` bounds, None for what is not known."""
    return _seconds([kernel for kernel in kernels if kernel.bound is bound]) / _seconds(kernels)


def _seconds(kernels: Sequence[Kernel]) -> float:
    return sum(kernel.weighted_s for kernel in kernels)
