"""The rounds of a replicate as they are stored: what disturbed each of them, and which ones figures come from."""

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import TypeVar

from optigpu.vocabulary import Frozen

T = TypeVar("T")


class RoundMark(StrEnum):
    """What disturbed a round."""

    OTHERS = "others"  # other processes used the CPUs
    OTHERS_ON_GPU = "others_on_gpu"  # other processes used the GPU
    STEAL = "steal"  # the hypervisor gave CPU time to other virtual machines
    QUOTA = "quota"  # the control group's CPU quota made threads wait
    HEAT = "heat"  # heat, or a brake of the GPU's board, lowered the clock
    SUSPENDED = "suspended"  # the machine was suspended
    SLOW_PROBE = "slow_probe"  # a fixed loop of arithmetic took much longer than at the job's fastest
    UNCOUNTED = "uncounted"  # a counter went backwards, so that what others used is not known


class RoundRecord(Frozen):
    """One round of a process: its next `requests` samples. Rounds of the same position in two variants that were side
    by side consist of turns that followed each other's."""

    requests: int
    seconds: float  # without the turns of others
    turns: tuple[int, ...] = ()  # requests of each of its turns; empty: nothing else took turns with it
    counted: bool = True  # whether figures come from it
    marks: tuple[RoundMark, ...] = ()
    lost: float = 0.0  # the share of its time that what disturbed it can have cost at most, from 0 to 1
    others_cores: float | None = None  # cores that other processes used; null: not counted
    stolen_cores: float | None = None  # cores that the hypervisor gave away; null: not counted
    probe: float | None = None  # the probe's time relative to the fastest of the job; null: it was not timed


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
