"""What disturbed a round, by what the counters and the probe showed, what that can have cost, and which rounds a
replicate's figures come from: the clean ones where they are enough, else all. And the sentences about what disturbed
the replicate, made from the host samples of those rounds.

A computation that keeps all threads in step waits for the slowest of them, so that one second of one core that others
used costs about one second. Measured on two cores: a steady fifth of a core cost 11% of eager fp32 and 27% of int8.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from optigpu.conductor.verdicts.host_monitor import SERVICE, HostSample
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


HostSamples = Sequence[HostSample]

CROWDED_ROUNDS = 3
"""A process never rests if it runs or waits at both ends of all rounds, and of at least this many."""
CROWDING_CORES, CROWDING_LEAST_S = 0.002, 0.02
"""What such a process uses within the rounds at least: one that only runs while counters are read uses nothing."""
STEAL_SHARE = 0.01
"""Of the CPUs' time, taken by the hypervisor."""
CLOCK_CHANGE = 0.10
WALL_JUMP_S = 1.0

_GPU_POWER_CAP = "sw_power_cap"
_MOST_NAMES = 3
_LEAST_CORES = 0.01
"""A process that used less is not worth naming."""
_MOSTLY = 0.8


@dataclass(frozen=True)
class Disturbance:
    """One disturbance of a replicate: a sentence that "during replicate 1" can follow, and advice."""

    what: str
    advice: str | None = None

    def sentence(self, when: str) -> str:
        """For example "The CPU slowed down twice during replicate 1; cool it."."""
        return f"{self.what} {when}; {self.advice}." if self.advice else f"{self.what} {when}."


def foreign(samples: HostSamples, yardstick: Yardstick) -> Disturbance | None:
    """Other processes used the CPUs; None where the system does not count or they used none."""
    counted = [sample for sample in samples if sample.foreign_s is not None]
    wall_s = sum(sample.wall_s for sample in counted)
    cores = sum(yardstick.lost(sample).others_s for sample in counted) / wall_s if wall_s else 0.0
    if cores < _LEAST_CORES:
        return None
    used = _named_cores(counted, wall_s)
    count = max(sample.cpus for sample in counted)
    of = f"{cores:.2f} of {count} cores" if count > 1 else f"{cores:.2f} of 1 core"
    if used.get(SERVICE, 0.0) > _MOSTLY * cores:
        return Disturbance(f"{SERVICE} used {of}", "leave its pages alone while it measures")
    most = [name for name in sorted(used, key=lambda name: -used[name]) if used[name] >= _LEAST_CORES]
    named = ", ".join(f"{name} {used[name]:.2f}" for name in most[:_MOST_NAMES])
    names = f" ({named})" if most else ""
    return Disturbance(f"Other processes used {of}{names}", "stop them and measure again")


def foreign_on_gpu(samples: HostSamples) -> Disturbance | None:
    count = max((sample.gpu_foreign for sample in samples), default=0)
    if count == 0:
        return None
    if count == 1:
        return Disturbance("Another process used the GPU", "stop it and measure again")
    return Disturbance(f"{count} other processes used the GPU", "stop them and measure again")


def crowded(samples: HostSamples) -> Disturbance | None:
    """Another process never rested, however little of the CPUs it got."""
    if len(samples) < CROWDED_ROUNDS:
        return None
    wall_s = sum(sample.wall_s for sample in samples)
    always = frozenset.intersection(*(sample.crowding for sample in samples))
    used = _named_cores(samples, wall_s)
    least = max(CROWDING_CORES, CROWDING_LEAST_S / wall_s)
    names = sorted({name for _, _, name in always if used.get(name, 0.0) >= least})
    if not names:
        return None
    return Disturbance(
        f"Other processes ({', '.join(names[:_MOST_NAMES])}) ran or waited for a CPU all the time",
        "stop them and measure again",
    )


def stolen(samples: HostSamples, least: float = STEAL_SHARE) -> Disturbance | None:
    """The hypervisor gave more than this share of the CPUs' time to other machines."""
    counted = [sample for sample in samples if sample.steal_s is not None]
    time_s = sum(sample.wall_s * sample.cpus for sample in counted)
    stolen_s = sum(sample.steal_s or 0.0 for sample in counted)
    if not time_s or stolen_s <= least * time_s:
        return None
    return Disturbance(
        f"The hypervisor gave {100 * stolen_s / time_s:.1f}% of the CPUs' time to other virtual machines"
    )


def beside_another_job(samples: HostSamples) -> Disturbance | None:
    if any(sample.others for sample in samples):
        return Disturbance("Another job was measured on another device of this host")
    return None


def quota(samples: HostSamples) -> Disturbance | None:
    waited_s = sum(sample.quota_wait_s for sample in samples)
    what = "The control group's CPU quota made threads wait"
    return _slowed(samples, waited_s, what, "raise the quota and measure again")


def gpu_heat(samples: HostSamples) -> Disturbance | None:
    heat_s = sum(sample.gpu_heat_s or 0.0 for sample in samples)
    return _slowed(samples, heat_s, "Heat lowered the GPU's clock", "cool it and measure again")


def _slowed(samples: HostSamples, seconds: float, what: str, advice: str | None = None) -> Disturbance | None:
    wall_s = sum(sample.wall_s for sample in samples)
    if seconds <= SLOWED_SHARE * wall_s:
        return None
    return Disturbance(f"{what} for {seconds:.2f} s of {wall_s:.1f} s", advice)


def hot(samples: HostSamples) -> Disturbance | None:
    """Heat or a brake of the board slowed the device down for a time that is not counted."""
    slowdowns = sum(sample.heat_slowdowns for sample in samples)
    if slowdowns:
        times = "once" if slowdowns == 1 else f"{slowdowns} times"
        return Disturbance(
            f"The CPU slowed down {times} because of heat",
            "cool it or lower its power limit, and measure again",
        )
    brakes = GPU_BRAKES & frozenset().union(*(sample.gpu_slowdowns for sample in samples))
    if not brakes:
        return None
    return Disturbance(
        f"The GPU lowered its clock ({', '.join(sorted(brakes))})", "check its cooling and its power supply"
    )


def slow_probe(samples: HostSamples, yardstick: Yardstick) -> Disturbance | None:
    """The machine computed slower than at its fastest in this job, and no counter says why."""
    slowness = sorted(filter(None, map(yardstick.slowness, samples)))
    if not slowness:
        return None
    typical = slowness[len(slowness) // 2]
    return Disturbance(f"This machine computed {typical:.2f} times slower than at its fastest in this job")


def suspended(samples: HostSamples) -> Disturbance | None:
    slept_s = sum(sample.suspended_s for sample in samples)
    if slept_s <= SUSPENDED_S:
        return None
    return Disturbance(
        f"The machine was suspended for {slept_s:.1f} s", "keep it awake while it measures, and measure again"
    )


def uncounted(samples: HostSamples) -> Disturbance | None:
    names = sorted({name for sample in samples for name in sample.backwards})
    if not names:
        return None
    return Disturbance(
        f"The kernel's count {' and that '.join(names)} went backwards", "this hides what others used"
    )


def unstable(samples: HostSamples) -> Disturbance | None:
    """The device's clock changed between rounds, its power limit lowered it, or the time of day was changed."""
    clocks_hz = [sample.clock_hz for sample in samples if sample.clock_hz]
    if clocks_hz and max(clocks_hz) - min(clocks_hz) > CLOCK_CHANGE * max(clocks_hz):
        return Disturbance(
            f"The clock changed between {min(clocks_hz) / 1e6:.0f} and {max(clocks_hz) / 1e6:.0f} MHz",
            "lock it for steadier results",
        )
    capped_s = sum(sample.gpu_power_cap_s or 0.0 for sample in samples)
    capped = _slowed(samples, capped_s, "The power limit lowered the GPU's clock")
    if capped:
        return capped
    if any(_GPU_POWER_CAP in sample.gpu_slowdowns for sample in samples):
        return Disturbance("The power limit lowered the GPU's clock at the end of a round")
    jump_s = max((sample.wall_jump_s for sample in samples), key=abs, default=0.0)
    if abs(jump_s) > WALL_JUMP_S:
        return Disturbance(
            f"The time of day was changed by {jump_s:+.1f} s",
            "the samples are not affected, because another clock times them, but dates of this job may be wrong",
        )
    return None


def _named_cores(samples: HostSamples, wall_s: float) -> dict[str, float]:
    used: dict[str, float] = {}
    for name, seconds in (item for sample in samples for item in sample.named.items()):
        used[name] = used.get(name, 0.0) + seconds / wall_s
    return used
