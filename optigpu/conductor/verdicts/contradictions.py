"""What a replicate's own samples show: outputs that were cached, requests that stood still, a speed that changed.

And what a measuring process says, held against what the conductor sees of it from outside. The conductor is another
process: its clock, and the kernel's counts of CPU time, are out of a technique's reach. Each finding needs more than
the scheduling of a busy machine can explain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from optigpu.conductor.processes.answers import is_later
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts.cost import Evidence, times
from optigpu.conductor.verdicts.disturbance import Disturbance
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.job.spec import Variant
from optigpu.models.held import GGUF
from optigpu.quality.divergence import FLOAT_ERROR
from optigpu.statistics.changes import Array, drift
from optigpu.vocabulary import DeviceKind

CACHED_RATIO = 1.5
"""A request with fresh inputs may take this many times as long as a repeated one."""
CACHED_PAIRS = 8
"""If so many fresh requests, in turns with repeated ones, are all slower than all of these but one, that is no chance:
it happens less than once in a thousand audits, even where half of the requests are slow. One may have stood still."""
AFTER_A_PAUSE = 3
"""The first requests of a round follow a pause, as the audit's do."""
DRIFT_FROM_S = 15.0
"""Of rounds, all replicates together: a virtual machine's speed varies by half within seconds."""
STOPPED_RATIO, STOPPED_S = 20.0, 1.0
"""A request that takes this many times the median, and this many seconds more, was stopped from outside."""
EXPLAINED_SHARE = 0.5
"""A stop is explained where what disturbed its round can have cost this share of it."""
_FASTEST = 0.05
_MOST_LOST = 0.95


def stop(evidence: Evidence) -> tuple[Disturbance, float] | None:
    """The longest request that stood still and that nothing else explains, and the share of a figure that it cost."""
    replicate = evidence.replicate
    if len(replicate.request_s) == sum(replicate.rounds):
        seconds: Array = np.asarray(evidence.selection.of(replicate.request_s))
    elif "latency_s" in replicate.samples:
        seconds = evidence.times("latency_s")
    else:
        return None
    # For each request, the seconds that its whole round can have lost.
    lost_s = evidence.of_requests([record.lost * record.seconds for record in evidence.records])
    typical_s = float(np.median(seconds))
    stopped = (seconds > STOPPED_RATIO * typical_s) & (seconds - typical_s > STOPPED_S)
    unexplained = stopped & (EXPLAINED_SHARE * (seconds - typical_s) > lost_s)
    if not unexplained.any():
        return None
    longest_s = float(seconds[unexplained].max() - typical_s)
    found = Disturbance(
        f"A request stood still for {longest_s:.1f} s",
        "do not stop or debug the measuring process, and measure again",
    )
    costs = [
        float(1 - min(1.0, np.median(values[~stopped]) / np.median(values)))
        for values in map(evidence.times, replicate.samples)
    ]
    return found, max(costs)


@dataclass(frozen=True)
class Drift:
    """How the last third's requests differ from the first's, relative to these."""

    change: float
    # The share of the figure that is gone relative to the fastest twentieth of all requests.
    cost: float

    @property
    def share(self) -> float:
        """The share of the speed by which the slower of the two thirds is behind the other."""
        return 1 - min(1 + self.change, 1 / (1 + self.change))


def drifted(primary: str, evidence: Sequence[Evidence]) -> Drift | None:
    """A lasting change of the speed; None where there is none. Over all replicates in their order: a change that ends
    within one of them is part of the interval. What disturbed the rounds may explain it: then it is gone, or smaller,
    without the time that this can have cost."""
    if sum(each.wall_s for each in evidence) < DRIFT_FROM_S:
        return None
    raw = np.concatenate([each.times(primary) for each in evidence])
    shares = np.concatenate([each.of_requests([record.lost for record in each.records]) for each in evidence])
    found = drift(raw), drift(raw * (1 - np.minimum(shares, _MOST_LOST)))
    if found[0] is None or found[1] is None or found[0] * found[1] < 0:
        return None
    cost = 1 - float(np.quantile(raw, _FASTEST) / np.median(raw))
    return Drift(min(found[0], found[1], key=abs), cost)


def cached(primary: str, evidence: Evidence) -> Disturbance | None:
    """Even the fastest request with fresh inputs took much longer than the repeated ones. It is compared with the
    slowest of the rounds that figures come from, with the first requests of a round, and with repeated requests
    between the fresh ones, if there are any. What disturbed the audit may explain it, unless so many pairs say the
    same that this is no chance. Brought code is exempt: its calls take microseconds, and drawing inputs empties the
    caches; the conductor's clock judges it (`_answered_later`)."""
    audit = None if evidence.replicate.kernel else evidence.replicate.audit
    for name in dict.fromkeys(("latency_s", "ttft_s", primary)):
        if audit is None or not audit.samples.get(name) or name not in evidence.replicate.samples:
            continue
        fresh, between = times(name, audit.samples[name]), times(name, audit.repeated.get(name, ()))
        enough = min(len(fresh), len(between)) >= CACHED_PAIRS
        repeated = max((_slowest_round(evidence, name), *np.sort(between)[: -1 if enough else None]))
        left = 1.0 if enough else _undisturbed(evidence, fresh, between)
        if fresh.min() * left > CACHED_RATIO * repeated:
            return Disturbance(
                f"Requests with fresh inputs took at least {fresh.min() / repeated:.1f} times as long as "
                f"repeated ones ({name})",
                "outputs were cached: disable the cache",
            )
    return None


def _slowest_round(evidence: Evidence, name: str) -> float:
    values = times(name, evidence.replicate.samples[name])
    rounds = np.split(values, list(accumulate(evidence.replicate.rounds))[:-1])
    counted = [
        each for each, record in zip(rounds, evidence.selection.records, strict=True) if record.counted
    ]
    return max(max(float(np.median(each)), float(each[:AFTER_A_PAUSE].min())) for each in counted)


def _undisturbed(evidence: Evidence, fresh: Array, between: Array) -> float:
    """The share of the fresh requests' time that would be left if all that disturbed the audit had hit them alone."""
    sample, yardstick = evidence.replicate.audit_sample, evidence.selection.yardstick
    if sample is None or sample.wall_s <= 0:
        return 1.0
    fresh_s = sample.wall_s * float(fresh.sum() / (fresh.sum() + between.sum()))
    return max(0.0, 1 - yardstick.lost(sample).total_s / fresh_s) / yardstick.slow(sample)


UNTOLD_SHARE, UNTOLD_LEAST_S = 0.2, 0.25
"""Of the time that passed outside, so much may be in no request, beyond what is explained."""
MESSAGE_S, TURN_MESSAGE_S, REQUEST_MESSAGE_S = 0.05, 0.002, 5e-5
"""Seconds of a round, of each of its turns and of each of its requests, for messages and the collection of garbage."""
TOLD_TOO_MUCH = 1.02
"""Requests take no longer than passed outside, within the rates of two clocks of one machine."""
WHOLE_SHARE = 0.7
"""Of a request's time, so much at least is in the metric that its workload calls whole."""
SPIN_S = 0.25
"""After a parallel region some libraries let their threads wait in a busy loop, for a fifth of a second. A pause
that began when the process was at rest has none of that."""
IDLE_SHARE, IDLE_LEAST_S = 0.05, 0.3
"""Of the time in which a process was asked nothing, and in seconds, so much CPU time is work."""
SLEPT_SHARE, SLEPT_LEAST_S, AWAKE_SHARE, SLOW_WARM_UP = 0.5, 0.5, 0.1, 2.0
"""A warm-up slept if all CPUs rested for so much of it and for little of the timed rounds, and its steady requests took
so many times as long as timed ones: a process that was stopped once has one such request."""
_EXACT = ("float32", "float64")
_DIVERGENCE = "kld_mean"


def clock(variant: Variant, evidence: Evidence) -> Disturbance | None:
    """The times that the process tells contradict each other, or the time that passed outside."""
    replicate = evidence.replicate
    if len(replicate.request_s) != sum(replicate.rounds) or not replicate.outside_s:
        return None
    ends = np.cumsum(replicate.rounds)[:-1]
    told_s: Array = np.asarray([part.sum() for part in np.split(np.asarray(replicate.request_s), ends)])
    passed_s = np.asarray(replicate.outside_s)
    if told_s.sum() > TOLD_TOO_MUCH * passed_s.sum() + MESSAGE_S * len(passed_s):
        return _contradicted(
            f"Requests are said to have taken {told_s.sum():.2f} s, and {passed_s.sum():.2f} s passed"
        )
    if variant.endpoint is not None or variant.workload.is_served:
        return None
    # Messages and waiting for a CPU explain a part; who waits for a CPU waits while another process has it.
    waited_s = [
        sum(
            max(0.0, each or 0.0)
            for each in (sample.foreign_s, sample.steal_s, sample.quota_wait_s, sample.suspended_s)
        )
        for sample in replicate.host_samples
    ]
    turns: Array = np.asarray([len(each) for each in replicate.turns] or [0] * len(replicate.rounds))
    messages_s: Array = MESSAGE_S + TURN_MESSAGE_S * turns + REQUEST_MESSAGE_S * np.asarray(replicate.rounds)
    explained_s: Array = messages_s + np.asarray(waited_s)
    untold_s = passed_s - told_s - explained_s
    # Of a process that was stopped once, between two requests, one round has such a time.
    if np.median(untold_s / passed_s) > UNTOLD_SHARE and untold_s.sum() > UNTOLD_LEAST_S:
        return _contradicted(
            f"{passed_s.sum():.2f} s passed while requests are said to have taken {told_s.sum():.2f} s, and neither "
            f"messages nor other processes explain {untold_s.sum():.2f} s of the difference"
        )
    return _left_out(variant, replicate) or _answered_later(variant, replicate)


def _contradicted(what: str) -> Disturbance:
    return Disturbance(what, "look for what changes a clock or works after it has stopped")


def _left_out(variant: Variant, replicate: Replicate) -> Disturbance | None:
    """The clock of the metric that is a whole request stops long before the request ends, in half of all requests."""
    whole = variant.workload.whole
    if whole is None or whole not in replicate.samples:
        return None
    shares = np.asarray(replicate.samples[whole]) / np.maximum(replicate.request_s, 1e-12)
    share = float(np.median(shares))
    if share >= WHOLE_SHARE:
        return None
    return _contradicted(f"{whole} is {100 * share:.0f}% of the time that a request takes")


def _answered_later(variant: Variant, replicate: Replicate) -> Disturbance | None:
    """By the conductor's clock, brought code answers later than its calls are said to take."""
    found = replicate.kernel
    if found is None or found.outside_s is None:
        return None
    told_s = float(np.median(replicate.samples[variant.workload.primary]))
    if not is_later(found, told_s):
        return None
    return _contradicted(
        f"A call is said to take {1e6 * told_s:.4g} us, and of calls with fresh inputs, whose answers were read, each "
        f"took {1e6 * found.outside_s:.4g} us"
    )


def idle_work(variant: Variant, evidence: Evidence) -> Disturbance | None:
    """The process computed while it was asked nothing: for itself, or to slow others that were timed then."""
    replicate = evidence.replicate
    if variant.device is not DeviceKind.CPU or variant.endpoint is not None or not replicate.pauses:
        return None
    spinning = max(0, (replicate.ready.facts.threads or 1) - 1)
    wall_s = sum(pause.wall_s for pause in replicate.pauses)
    worked_s = sum(
        max(0.0, each.used_s - (0 if each.rested else spinning) * min(SPIN_S, each.wall_s))
        for each in replicate.pauses
    )
    if worked_s <= max(IDLE_SHARE * wall_s, IDLE_LEAST_S):
        return None
    return Disturbance(
        f"The process used {worked_s:.2f} s of CPU time in {wall_s:.2f} s in which it was asked nothing",
        "look for a thread that it left running",
    )


def slept(variant: Variant, evidence: Evidence) -> Disturbance | None:
    """The warm-up slept and timed requests did not: what it says of a request's length is made up."""
    sample = evidence.replicate.warm_up
    if variant.device is not DeviceKind.CPU or variant.endpoint is not None or sample is None:
        return None
    rounds, request_s = evidence.replicate.host_samples, evidence.replicate.request_s
    resting, asleep_s = _resting_s(sample), sum(map(_resting_s, rounds))
    is_slow = bool(request_s) and evidence.replicate.ready.request_s > SLOW_WARM_UP * float(
        np.median(request_s)
    )
    rested = resting > max(SLEPT_SHARE * sample.wall_s, SLEPT_LEAST_S)
    if not (is_slow and rested) or asleep_s > AWAKE_SHARE * sum(each.wall_s for each in rounds):
        return None
    return Disturbance(
        f"All CPUs rested for {resting:.2f} of {sample.wall_s:.2f} s of its warm-up, and not while requests were timed",
        "look for what waits during the first requests",
    )


def _resting_s(sample: HostSample) -> float:
    """Seconds in which no CPU can have worked, at least: one that works leaves the others idle at most."""
    return 0.0 if sample.idle_s is None else max(0.0, sample.idle_s - (sample.cpus - 1) * sample.wall_s)


def replaced(evidence: Evidence) -> Disturbance | None:
    """Functions of the clock, the meters or the workload were exchanged within the process."""
    replicate = evidence.replicate
    audited = replicate.audit.replaced if replicate.audit else ()
    names = dict.fromkeys([*audited, *(name for each in replicate.metered for name in each.replaced)])
    if not names:
        return None
    return Disturbance(
        f"The process no longer measured by its own code: {', '.join(names)} was replaced",
        "look for what changes it",
    )


def rounding(variant: Variant, evidence: Evidence) -> Disturbance | None:
    """Matrices were multiplied in fewer bits than float32, and nothing in the stack says so."""
    narrow = [name for name in evidence.replicate.ready.facts.product_dtypes or () if name not in _EXACT]
    if not narrow or any(technique.rounds for technique in variant.stack):
        return None
    return Disturbance(
        f"Matrices were multiplied in {' and '.join(narrow)}, and no technique of the stack rounds",
        "name the technique that does",
    )


def another_model(variant: Variant, evidence: Evidence) -> Disturbance | None:
    """Predictions are not those of fp32 with the same weights, and nothing says that they may be others. Judged where
    divergence was measured, the weights are float32 and each technique keeps what is predicted. Where convolutions run
    in TF32, as torch has them on a GPU, they round without a technique, and so does an engine that is given a file of
    few bits: it multiplies the file's blocks by activations of 8 bits."""
    replicate = evidence.replicate
    facts, keeps = replicate.ready.facts, all(technique.keeps_predictions() for technique in variant.stack)
    few_bits = str(variant.model).endswith(GGUF) and facts.weights is not None and facts.weights.quantized
    if facts.dtype != "float32" or facts.cudnn_tf32 or not keeps or few_bits:
        return None
    found = [each.values[_DIVERGENCE] for each in replicate.metered if _DIVERGENCE in each.values]
    if not found or max(found) <= FLOAT_ERROR:
        return None
    return Disturbance(
        f"No technique of the stack rounds, and predictions diverged by {max(found):.2g} nat, where another order of "
        f"sums makes at most {FLOAT_ERROR:g}, from those of the same weights in float32",
        "leave out the technique or the engine that computes another model, or report it",
    )


def elsewhere(variant: Variant, evidence: Evidence) -> Disturbance | None:
    """The variant is one of a GPU, and none of its kernels ran there, or few of its matrix products."""
    if evidence.replicate.ready.facts.device_kernels is not False:
        return None
    return Disturbance(
        f"The CPU computed: the {variant.device} device ran no kernel, or less than half of the matrix products",
        "look for an operator that falls back to the CPU",
    )
