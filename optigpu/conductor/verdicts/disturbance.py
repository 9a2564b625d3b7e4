"""Disturbances of a replicate, found in the host samples of its rounds.

The samples of one replicate are judged together, because its median comes from all of its rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.vocabulary import DeviceKind

HostSamples = Sequence[HostSample]

JUDGED_FROM_S = 0.5
"""The kernel counts CPU time in steps of a hundredth of a second; less than this is too few of them."""
FOREIGN_CORES, FOREIGN_SHARE, FOREIGN_CORES_AT_MOST = 0.15, 0.01, 0.5
"""So many cores' time is too much for others: a hundredth of the host's, within these bounds. The daemons of a quiet
host take less, and one process that does not rest takes a whole one."""
FOREIGN_LEAST_S = 0.25
"""Less CPU time of others is ignored: a daemon's short burst is a large share of rounds of half a second."""
FREE_CORES = 0.5
"""A job on a GPU is not disturbed by others' load while this much of the CPUs is idle."""
CROWDED_ROUNDS = 3
"""A process never rests if it runs or waits at both ends of all rounds, and of at least this many."""
STEAL_SHARE = 0.01
"""Of the CPUs' time, taken by the hypervisor."""
SLOWED_SHARE = 0.01
"""Of the rounds' time, in which a quota, heat or a power limit slowed the device."""
CLOCK_CHANGE = 0.10
SUSPENDED_S = 0.1
WALL_JUMP_S = 1.0

_GPU_THROTTLES = {"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}
_GPU_POWER_CAP = "sw_power_cap"
_MOST_NAMES = 3
_LEAST_CORES = 0.01
"""A process that used less is not worth naming."""


@dataclass(frozen=True)
class Disturbance:
    """One disturbance of a replicate: a sentence that "during replicate 1" can follow, and advice."""

    what: str
    advice: str | None = None

    def sentence(self, when: str) -> str:
        """For example "The CPU slowed down twice during replicate 1; cool it."."""
        return f"{self.what} {when}; {self.advice}." if self.advice else f"{self.what} {when}."


def foreign(device: DeviceKind, samples: HostSamples) -> Disturbance | None:
    """Other processes used the CPUs, or the GPU."""
    on_gpu = max((sample.gpu_foreign for sample in samples), default=0)
    if on_gpu:
        if on_gpu == 1:
            return Disturbance("Another process used the GPU", "stop it and measure again")
        return Disturbance(f"{on_gpu} other processes used the GPU", "stop them and measure again")
    counted = [sample for sample in samples if sample.foreign_s is not None]
    wall_s = sum(sample.wall_s for sample in counted)
    if wall_s < JUDGED_FROM_S or (device is DeviceKind.CUDA and _idle_cores(counted) >= FREE_CORES):
        return None
    foreign_s = sum(sample.foreign_s or 0.0 for sample in counted)
    cores, cpus = foreign_s / wall_s, max(sample.cpus for sample in counted)
    allowed = min(max(FOREIGN_CORES, FOREIGN_SHARE * cpus), FOREIGN_CORES_AT_MOST)
    if foreign_s > FOREIGN_LEAST_S and cores > allowed:
        used = f"{cores:.2f} of {_cores(cpus)}{_names(counted, wall_s)}"
        return Disturbance(f"Other processes used {used}", "stop them and measure again")
    return _crowded(counted)


def throttled(samples: HostSamples) -> Disturbance | None:
    """Heat, a power limit of the board or a CPU quota slowed the device down."""
    slowdowns = sum(sample.heat_slowdowns for sample in samples)
    if slowdowns:
        times = "once" if slowdowns == 1 else f"{slowdowns} times"
        return Disturbance(
            f"The CPU slowed down {times} because of heat",
            "cool it or lower its power limit, and measure again",
        )
    wall_s = sum(sample.wall_s for sample in samples)
    waited_s = sum(sample.quota_wait_s for sample in samples)
    if waited_s > SLOWED_SHARE * wall_s:
        return Disturbance(
            f"The control group's CPU quota made threads wait for {waited_s:.2f} s of {wall_s:.1f} s",
            "raise the quota and measure again",
        )
    heat_s = sum(sample.gpu_heat_s or 0.0 for sample in samples)
    if heat_s > SLOWED_SHARE * wall_s:
        return Disturbance(
            f"Heat lowered the GPU's clock for {heat_s:.2f} s of {wall_s:.1f} s", "cool it and measure again"
        )
    brakes = _GPU_THROTTLES & frozenset().union(*(sample.gpu_slowdowns for sample in samples))
    if brakes:
        return Disturbance(
            f"The GPU lowered its clock ({', '.join(sorted(brakes))})",
            "check its cooling and its power supply",
        )
    return None


def suspended(samples: HostSamples) -> Disturbance | None:
    """The machine was suspended during a round."""
    slept_s = sum(sample.suspended_s for sample in samples)
    if slept_s <= SUSPENDED_S:
        return None
    return Disturbance(
        f"The machine was suspended for {slept_s:.1f} s", "keep it awake while it measures, and measure again"
    )


def shared(samples: HostSamples) -> Disturbance | None:
    """The hypervisor gave CPU time to other machines, or another job was measured on this host."""
    counted = [sample for sample in samples if sample.steal_s is not None]
    time_s = sum(sample.wall_s * sample.cpus for sample in counted)
    stolen_s = sum(sample.steal_s or 0.0 for sample in counted)
    if time_s and stolen_s > STEAL_SHARE * time_s:
        return Disturbance(
            f"The hypervisor gave {100 * stolen_s / time_s:.1f}% of the CPUs' time to other virtual machines"
        )
    if any(sample.others for sample in samples):
        return Disturbance("Another job was measured on another device of this host")
    return None


def unstable(samples: HostSamples) -> Disturbance | None:
    """The device's clock changed between rounds, its power limit lowered it, or the time of day was changed."""
    clocks_hz = [sample.clock_hz for sample in samples if sample.clock_hz]
    if clocks_hz and max(clocks_hz) - min(clocks_hz) > CLOCK_CHANGE * max(clocks_hz):
        return Disturbance(
            f"The clock changed between {min(clocks_hz) / 1e6:.0f} and {max(clocks_hz) / 1e6:.0f} MHz",
            "lock it for steadier results",
        )
    wall_s = sum(sample.wall_s for sample in samples)
    capped_s = sum(sample.gpu_power_cap_s or 0.0 for sample in samples)
    if capped_s > SLOWED_SHARE * wall_s:
        return Disturbance(f"The power limit lowered the GPU's clock for {capped_s:.2f} s of {wall_s:.1f} s")
    if any(_GPU_POWER_CAP in sample.gpu_slowdowns for sample in samples):
        return Disturbance("The power limit lowered the GPU's clock at the end of a round")
    jump_s = max((sample.wall_jump_s for sample in samples), key=abs, default=0.0)
    if abs(jump_s) > WALL_JUMP_S:
        return Disturbance(
            f"The time of day was changed by {jump_s:+.1f} s",
            "the samples are not affected, because another clock times them, but dates of this job may be wrong",
        )
    return None


def _idle_cores(samples: HostSamples) -> float:
    wall_s = sum(sample.wall_s for sample in samples)
    return sum(sample.idle_s or 0.0 for sample in samples) / wall_s if wall_s else math.inf


def _cores(count: int) -> str:
    return f"{count} cores" if count > 1 else "1 core"


def _names(samples: HostSamples, wall_s: float) -> str:
    """The processes that used most, each with its cores; empty if none of them can be seen."""
    used: dict[str, float] = {}
    for name, seconds in (item for sample in samples for item in sample.named.items()):
        used[name] = used.get(name, 0.0) + seconds
    cores = {name: seconds / wall_s for name, seconds in used.items() if seconds >= _LEAST_CORES * wall_s}
    most = sorted(cores, key=lambda name: -cores[name])[:_MOST_NAMES]
    return f" ({', '.join(f'{name} {cores[name]:.2f}' for name in most)})" if most else ""


def _crowded(samples: HostSamples) -> Disturbance | None:
    if len(samples) < CROWDED_ROUNDS:
        return None
    always = frozenset.intersection(*(sample.crowding for sample in samples))
    if not always:
        return None
    names = ", ".join(sorted({name for _, _, name in always})[:_MOST_NAMES])
    return Disturbance(
        f"Other processes ({names}) ran or waited for a CPU all the time", "stop them and measure again"
    )
