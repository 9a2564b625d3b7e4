"""Sentences about what disturbed a replicate, made from the host samples of the rounds that its figures come from."""

from collections.abc import Sequence
from dataclasses import dataclass

from optigpu.conductor.verdicts.host_monitor import SERVICE, HostSample
from optigpu.conductor.verdicts.marks import GPU_BRAKES, SLOWED_SHARE, SUSPENDED_S, Yardstick

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
