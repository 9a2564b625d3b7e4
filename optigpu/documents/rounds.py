"""The rounds of a replicate as they are stored: what disturbed each of them, and which ones figures come from."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import TypeVar

from optigpu.vocabulary import Frozen

T = TypeVar("T")


class RoundMark(StrEnum):
    """What disturbed a round."""

    # Other processes used the CPUs.
    OTHERS = "others"
    # Other processes used the GPU.
    OTHERS_ON_GPU = "others_on_gpu"
    # The hypervisor gave CPU time to other virtual machines.
    STEAL = "steal"
    # The control group's CPU quota made threads wait.
    QUOTA = "quota"
    # Heat, or a brake of the GPU's board, lowered the clock.
    HEAT = "heat"
    # The machine was suspended.
    SUSPENDED = "suspended"
    # A fixed loop of arithmetic, timed beside the round, took much longer than at the job's fastest.
    SLOW_PROBE = "slow_probe"
    # A counter went backwards, so that what others used is not known.
    UNCOUNTED = "uncounted"


class RoundRecord(Frozen):
    """One round of a process: its next `requests` samples. Rounds of the same position in two variants that were side
    by side consist of turns that followed each other's."""

    requests: int
    # Without the turns of others.
    seconds: float
    # How many of the requests each of its turns had; empty where nothing else took turns with it.
    turns: tuple[int, ...] = ()
    # Whether figures come from it.
    counted: bool = True
    marks: tuple[RoundMark, ...] = ()
    # The share of its time that what disturbed it can have cost at most, from 0 to 1.
    lost: float = 0.0
    # Cores that other processes used, and that the hypervisor gave away; null: the system does not count them.
    others_cores: float | None = None
    stolen_cores: float | None = None
    # The probe's time relative to the fastest of the job; null: it was not timed.
    probe: float | None = None


def counted(records: Sequence[RoundRecord], values: Sequence[T]) -> tuple[T, ...]:
    """Those of a process's samples that figures come from, one for each request; all where its rounds are not known."""
    if not records:
        return tuple(values)
    ends = list(accumulate(record.requests for record in records))
    return tuple(
        value
        for record, end in zip(records, ends, strict=True)
        if record.counted
        for value in values[end - record.requests : end]
    )
