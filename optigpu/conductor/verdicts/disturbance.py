"""What disturbed a replicate, judged from the host_samples of its rounds. A finding is a sentence with its figures.

HostSamples of one replicate are judged together: what a minute of rounds shows is what its median went through.
"""

import math
from collections.abc import Iterable, Sequence

from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.vocabulary import DeviceKind

HostSamples = Sequence[HostSample]

JUDGED_FROM_S = 0.5
"""The kernel counts CPU time in steps of a hundredth of a second; less than this is too few of them."""
FOREIGN_CORES, FOREIGN_SHARE, FOREIGN_CORES_AT_MOST = 0.15, 0.01, 0.5
"""So many cores' time is too much for others: a hundredth of the host's, within these bounds. The daemons of a quiet
host take less, and one process that does not rest takes a whole one."""
FOREIGN_LEAST_S = 0.25
"""CPU seconds of others that matter at all: a daemon's short burst is a large share of rounds of half a second."""
FREE_CORES = 0.5
"""A job on a GPU is not disturbed by others' load while this much of the CPUs is idle."""
CROWDED_ROUNDS = 3
"""A process that is found running or waiting at both ends of so many rounds, and of all of them, never rests."""
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


def foreign(device: DeviceKind, host_samples: HostSamples) -> str | None:
    """Other processes used the CPUs, or the GPU."""
    on_gpu = max((sample.gpu_foreign for sample in host_samples), default=0)
    if on_gpu:
        return (
            f"{on_gpu} other process{'es' if on_gpu > 1 else ''} computed on the GPU; stop what else uses it."
        )
    counted = [sample for sample in host_samples if sample.foreign_s is not None]
    wall_s = sum(sample.wall_s for sample in counted)
    if wall_s < JUDGED_FROM_S or (device is DeviceKind.CUDA and _idle_cores(counted) >= FREE_CORES):
        return None
    foreign_s = sum(sample.foreign_s or 0.0 for sample in counted)
    cores = foreign_s / wall_s
    share = FOREIGN_SHARE * max(sample.cpus for sample in counted)
    if foreign_s > FOREIGN_LEAST_S and cores > min(max(FOREIGN_CORES, share), FOREIGN_CORES_AT_MOST):
        return (
            f"other processes used {cores:.2f} cores{_names(counted, wall_s)}; stop them and measure again."
        )
    return _crowded(counted)


def throttled(host_samples: HostSamples) -> str | None:
    """Heat, a power brake or a CPU quota slowed the device down."""
    slowdowns = sum(sample.heat_slowdowns for sample in host_samples)
    if slowdowns:
        return f"the CPU slowed down {slowdowns} times for heat; cool it, or lower its power limit."
    wall_s = sum(sample.wall_s for sample in host_samples)
    waited_s = sum(sample.quota_wait_s for sample in host_samples)
    if waited_s > SLOWED_SHARE * wall_s:
        return (
            f"the control group's CPU quota made threads wait for {waited_s:.2f} s within {wall_s:.1f} s; "
            "raise the quota."
        )
    heat_s = sum(sample.gpu_heat_s or 0.0 for sample in host_samples)
    if heat_s > SLOWED_SHARE * wall_s:
        return f"heat held the GPU's clock down for {heat_s:.2f} s within {wall_s:.1f} s; cool it."
    brakes = _GPU_THROTTLES & frozenset().union(*(sample.gpu_slowdowns for sample in host_samples))
    if brakes:
        return f"the GPU's clock was held down ({', '.join(sorted(brakes))}); look at its cooling and its power supply."
    return None


def suspended(host_samples: HostSamples) -> str | None:
    """The machine slept within a round."""
    slept_s = sum(sample.suspended_s for sample in host_samples)
    if slept_s <= SUSPENDED_S:
        return None
    return f"the machine was suspended for {slept_s:.1f} s; keep it awake while it measures."


def shared(host_samples: HostSamples) -> str | None:
    """The hypervisor gave CPU time to other machines, or another job was measured on this host."""
    counted = [sample for sample in host_samples if sample.steal_s is not None]
    time_s = sum(sample.wall_s * sample.cpus for sample in counted)
    stolen_s = sum(sample.steal_s or 0.0 for sample in counted)
    if time_s and stolen_s > STEAL_SHARE * time_s:
        return f"the hypervisor took {100 * stolen_s / time_s:.1f}% of the CPUs' time for other machines."
    if any(sample.others for sample in host_samples):
        return "another job was measured on this host, on a device of its own."
    return None


def unstable(host_samples: HostSamples) -> str | None:
    """The device's clock changed between rounds, its power limit held it down, or somebody set the time of day."""
    clocks_hz = [sample.clock_hz for sample in host_samples if sample.clock_hz]
    if clocks_hz and max(clocks_hz) - min(clocks_hz) > CLOCK_CHANGE * max(clocks_hz):
        return (
            f"the clock was between {min(clocks_hz) / 1e6:.0f} and {max(clocks_hz) / 1e6:.0f} MHz after the rounds; "
            "fix it for a steadier figure."
        )
    wall_s = sum(sample.wall_s for sample in host_samples)
    capped_s = sum(sample.gpu_power_cap_s or 0.0 for sample in host_samples)
    if capped_s > SLOWED_SHARE * wall_s:
        return f"the power limit held the GPU's clock down for {capped_s:.2f} s within {wall_s:.1f} s."
    if any(_GPU_POWER_CAP in sample.gpu_slowdowns for sample in host_samples):
        return "the power limit held the GPU's clock down at the end of a round."
    jump_s = max((sample.wall_jump_s for sample in host_samples), key=abs, default=0.0)
    if abs(jump_s) > WALL_JUMP_S:
        return (
            f"the time of day was set by {jump_s:+.1f} s; samples are timed by a clock that does not follow, but dates "
            "of this job may be wrong."
        )
    return None


def _idle_cores(host_samples: HostSamples) -> float:
    wall_s = sum(sample.wall_s for sample in host_samples)
    return sum(sample.idle_s or 0.0 for sample in host_samples) / wall_s if wall_s else math.inf


def _names(host_samples: HostSamples, wall_s: float) -> str:
    """The processes that used most, each with its cores; empty where none of them can be seen."""
    used: dict[str, float] = {}
    for name, seconds in (item for sample in host_samples for item in sample.named.items()):
        used[name] = used.get(name, 0.0) + seconds
    cores = {name: seconds / wall_s for name, seconds in used.items() if seconds >= _LEAST_CORES * wall_s}
    most = sorted(cores, key=lambda name: -cores[name])[:_MOST_NAMES]
    return f" ({', '.join(f'{name} {cores[name]:.2f}' for name in most)})" if most else ""


def _crowded(host_samples: HostSamples) -> str | None:
    if len(host_samples) < CROWDED_ROUNDS:
        return None
    always = frozenset.intersection(*(sample.crowding for sample in host_samples))
    if not always:
        return None
    return f"{_listed(name for _, _, name in always)} ran or waited for a CPU all the time; stop it and measure again."


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))[:_MOST_NAMES])
