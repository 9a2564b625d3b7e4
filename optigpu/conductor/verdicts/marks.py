"""What disturbed a round, by what the counters and the probe showed, what that can have cost, and which rounds a
replicate's figures come from: the clean ones where they are enough, else all.

A computation that keeps all threads in step waits for the slowest of them, so that one second of one core that others
used costs about one second. Measured on two cores: a steady fifth of a core cost 11% of eager fp32 and 27% of int8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.documents.rounds import RoundMark, RoundRecord, counted
from optigpu.job.spec import Measure
from optigpu.statistics.within import FEWEST_FOR_INTERVAL, FEWEST_REQUESTS
from optigpu.vocabulary import DeviceKind

JUDGED_FROM_S = 0.1
"""A shorter round has too few of the kernel's ticks, and is marked only by what needs none."""
TICKS_S = 0.02
"""The kernel counts CPU time in steps of a hundredth of a second; two of them are noise."""
OTHERS_CORES, OTHERS_SHARE, OTHERS_CORES_AT_MOST = 0.05, 0.01, 0.5
"""So many cores' time may be lost unmarked: a hundredth of the host's, within these bounds. The daemons of a quiet host
take less. On a few cores it costs less than 3%, by what was measured on two."""
FREE_CORES = 0.5
"""A job on a GPU is not disturbed by others' load while this much of the CPUs is idle."""
SLOWED_SHARE = 0.02
"""Of a round's time, in which a quota or heat slowed the device."""
SLOW_PROBE = 1.25
"""A probe that takes this many times the job's fastest shows a slow machine; from one moment to the next it varies by
a tenth."""
SUSPENDED_S = 0.1
INTERRUPTION = 1.35
"""Seconds that one second of a core, taken by others, costs at most: the greatest that was measured up to a fifth of a
core."""
GPU_BRAKES = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}
)


@dataclass(frozen=True)
class Lost:
    """Seconds of a round that each kind of disturbance took."""

    others_s: float = 0.0
    stolen_s: float = 0.0
    quota_s: float = 0.0
    heat_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.others_s + self.stolen_s + self.quota_s + self.heat_s

    @property
    def cost_s(self) -> float:
        """What the lost seconds can have cost at most; a quota and heat stop all threads at once."""
        return INTERRUPTION * (self.others_s + self.stolen_s) + self.quota_s + self.heat_s


@dataclass(frozen=True)
class Yardstick:
    """What rounds are judged by: the device, and the probe's fastest time in the job, where it was timed."""

    device: DeviceKind
    fastest_probe_s: float | None = None

    def lost(self, sample: HostSample) -> Lost:
        has_free_cores = self.device is not DeviceKind.CPU and (
            sample.idle_s is None or sample.idle_s >= FREE_CORES * sample.wall_s
        )
        return Lost(
            others_s=0.0 if has_free_cores else max(0.0, sample.foreign_s or 0.0),
            stolen_s=0.0 if has_free_cores else max(0.0, sample.steal_s or 0.0),
            quota_s=sample.quota_wait_s,
            heat_s=sample.gpu_heat_s or 0.0,
        )

    def slowness(self, sample: HostSample) -> float | None:
        if sample.probe_s is None or not self.fastest_probe_s:
            return None
        return sample.probe_s / self.fastest_probe_s

    def lost_share(self, sample: HostSample) -> float:
        """The share of a round's time that what disturbed it can have cost at most, from 0 to 1. What others use shows
        itself in the probe: the greater of the two counts."""
        return max(self.counted_share(sample), 1 - 1 / self.slow(sample))

    def counted_share(self, sample: HostSample) -> float:
        """The same by the counters alone."""
        return min(1.0, self.lost(sample).cost_s / sample.wall_s) if sample.wall_s > 0 else 0.0

    def marks(self, sample: HostSample) -> tuple[RoundMark, ...]:
        """What disturbed the round; empty for a clean one."""
        lost, wall_s = self.lost(sample), sample.wall_s
        allowed_s = allowed_cores(sample.cpus) * wall_s + TICKS_S
        is_judged = wall_s >= JUDGED_FROM_S
        found = {
            RoundMark.OTHERS: is_judged and lost.others_s > allowed_s,
            RoundMark.OTHERS_ON_GPU: sample.gpu_foreign > 0,
            RoundMark.STEAL: is_judged and lost.stolen_s > allowed_s,
            RoundMark.QUOTA: lost.quota_s > SLOWED_SHARE * wall_s,
            RoundMark.HEAT: lost.heat_s > SLOWED_SHARE * wall_s
            or sample.heat_slowdowns > 0
            or bool(GPU_BRAKES & sample.gpu_slowdowns),
            RoundMark.SUSPENDED: sample.suspended_s > SUSPENDED_S,
            RoundMark.SLOW_PROBE: is_judged and self.slow(sample) > 1,
            RoundMark.UNCOUNTED: bool(sample.backwards),
        }
        return tuple(mark for mark, is_so in found.items() if is_so)

    def slow(self, sample: HostSample) -> float:
        """How many times slower the probe was, 1 where that is no more than it always varies."""
        slowness = self.slowness(sample) or 1.0
        return slowness if self.device is DeviceKind.CPU and slowness > SLOW_PROBE else 1.0


def allowed_cores(cpus: int) -> float:
    """How many cores' time may be lost on a host of so many."""
    return min(max(OTHERS_CORES, OTHERS_SHARE * cpus), OTHERS_CORES_AT_MOST)


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

    def of(self, values: Sequence[T]) -> tuple[T, ...]:
        """The samples that figures come from."""
        return counted(self.records, values)

    def unmarked(self, values: Sequence[T]) -> tuple[T, ...]:
        """The samples of rounds that nothing disturbed, whether figures come from these alone or from all."""
        clean = [record.model_copy(update={"counted": not record.marks}) for record in self.records]
        return counted(clean, values)


def select(
    requests: Sequence[int],
    host_samples: Sequence[HostSample],
    yardstick: Yardstick,
    goal: Goal,
    turns: Sequence[tuple[int, ...]] = (),
    seconds: Sequence[float] = (),
) -> Selection:
    """`requests` is how many each round had, and `host_samples` what happened during it; `turns` are those of rounds
    that took turns, and `seconds` how long these had without the others."""
    without_others_s = seconds or [sample.wall_s for sample in host_samples]
    rounds = zip(requests, without_others_s, turns or [()] * len(requests), host_samples, strict=True)
    records = [
        RoundRecord(
            requests=count,
            seconds=own_s,
            turns=its_turns,
            marks=yardstick.marks(sample),
            lost=yardstick.lost_share(sample),
            others_cores=None if sample.foreign_s is None else sample.foreign_s / max(sample.wall_s, 1e-9),
            stolen_cores=None if sample.steal_s is None else sample.steal_s / max(sample.wall_s, 1e-9),
            probe=yardstick.slowness(sample),
        )
        for count, own_s, its_turns, sample in rounds
    ]
    clean = [record for record in records if not record.marks]
    clean_s, found = sum(record.seconds for record in clean), sum(record.requests for record in clean)
    # With fewer requests than its goal a single process would have no interval.
    share = 1.0 if goal.requests >= FEWEST_FOR_INTERVAL else ENOUGH_SHARE
    if clean_s >= ENOUGH_SHARE * goal.seconds and found >= math.ceil(share * goal.requests):
        records = [record.model_copy(update={"counted": not record.marks}) for record in records]
    return Selection(tuple(records), tuple(host_samples), yardstick)
