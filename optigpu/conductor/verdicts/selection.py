"""Which rounds of a replicate its figures come from: the clean ones where they are enough, else all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.conductor.verdicts.marks import Yardstick
from optigpu.documents.rounds import RoundRecord, counted
from optigpu.job.spec import Measure
from optigpu.statistics.within import FEWEST_FOR_INTERVAL, FEWEST_REQUESTS

T = TypeVar("T")

ENOUGH_SHARE = 0.5
"""Clean rounds are measured until they are as many as were asked for. Where the time is up before that, this share of
the least time and of the least number of requests is enough."""


@dataclass(frozen=True)
class Goal:
    """How many clean seconds and requests a replicate is to have."""

    seconds: float
    requests: int

    @classmethod
    def of(cls, measure: Measure, request_s: float) -> "Goal":
        """As many requests as make an interval, if `max_seconds` allows them: one process needs more than several."""
        affordable = int(measure.max_seconds / max(request_s, 1e-9))
        alone = measure.replicates == 1 and affordable >= FEWEST_FOR_INTERVAL
        fewest = FEWEST_FOR_INTERVAL if alone else FEWEST_REQUESTS
        return cls(measure.min_seconds, max(1, min(fewest, affordable)))

    @property
    def enough_seconds(self) -> float:
        """Clean seconds with which figures come from clean rounds alone."""
        return ENOUGH_SHARE * self.seconds

    @property
    def enough_requests(self) -> int:
        """The same of requests. With fewer than its goal a single process would have no interval."""
        return (
            self.requests if self.requests >= FEWEST_FOR_INTERVAL else math.ceil(ENOUGH_SHARE * self.requests)
        )


@dataclass(frozen=True)
class Selection:
    """The rounds of a replicate, each with its mark, and those of them that figures come from."""

    records: tuple[RoundRecord, ...]
    host_samples: tuple[HostSample, ...]
    yardstick: Yardstick

    @cached_property
    def is_disturbed(self) -> bool:
        """Whether figures come from disturbed rounds, since too few are clean."""
        return any(record.marks for record in self.records if record.counted)

    @cached_property
    def counted_samples(self) -> tuple[HostSample, ...]:
        """What happened during the rounds that figures come from."""
        return tuple(
            sample for sample, record in zip(self.host_samples, self.records, strict=True) if record.counted
        )

    def of(self, values: Sequence[T]) -> tuple[T, ...]:
        """The samples that figures come from."""
        return counted(self.records, values)

    def unmarked(self, values: Sequence[T]) -> tuple[T, ...]:
        """The samples of rounds that nothing disturbed, whether figures come from these alone or from all."""
        clean = [record.model_copy(update={"counted": not record.marks}) for record in self.records]
        return counted(clean, values)

    def lost_shares(self) -> tuple[float, ...]:
        """For each request that figures come from, the share of its time that disturbances can have cost at most."""
        return tuple(record.lost for record in self.records if record.counted for _ in range(record.requests))


def select(
    requests: Sequence[int],
    host_samples: Sequence[HostSample],
    yardstick: Yardstick,
    goal: Goal,
    turns: Sequence[tuple[int, ...]] = (),
    seconds: Sequence[float] = (),
) -> Selection:
    """`requests` is how many each round had, and `host_samples` what happened during it.

    `turns` are those of rounds that took turns with others', and `seconds` how long these had without the others.
    """
    own_s = seconds or [sample.wall_s for sample in host_samples]
    rounds = zip(requests, own_s, turns or [()] * len(requests), host_samples, strict=True)
    records = [_record(*each, yardstick) for each in rounds]
    clean = [record for record in records if not record.marks]
    clean_s, found = sum(record.seconds for record in clean), sum(record.requests for record in clean)
    if clean_s >= goal.enough_seconds and found >= goal.enough_requests:
        records = [record.model_copy(update={"counted": not record.marks}) for record in records]
    return Selection(tuple(records), tuple(host_samples), yardstick)


def _record(
    requests: int, seconds: float, turns: tuple[int, ...], sample: HostSample, yardstick: Yardstick
) -> RoundRecord:
    wall_s = max(sample.wall_s, 1e-9)
    return RoundRecord(
        requests=requests,
        seconds=seconds,
        turns=turns,
        marks=yardstick.marks(sample),
        lost=yardstick.lost_share(sample),
        others_cores=None if sample.foreign_s is None else sample.foreign_s / wall_s,
        stolen_cores=None if sample.steal_s is None else sample.steal_s / wall_s,
        probe=yardstick.slowness(sample),
    )
