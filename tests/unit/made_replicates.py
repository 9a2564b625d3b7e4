"""Replicates that are made up and the verdict on them; requests with a known truth: correlated, spread, with tails."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from optigpu.child.messages import Audited, Ready
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts.cost import Evidence
from optigpu.conductor.verdicts.disturbance import Goal, Yardstick
from optigpu.conductor.verdicts.host_monitor import HostSample
from optigpu.conductor.verdicts.judge import judge
from optigpu.documents.result import MetricSummary, Verdict
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec

Array = NDArray[np.float64]
QUIET = HostSample(wall_s=1.25, cpus=2, foreign_s=0.02, idle_s=1.0, steal_s=0.0, named={"sshd": 0.01})
ROUNDS = 4
REQUESTS = 30


def spec(device: str = "cpu", **limits: float) -> JobSpec:
    document = {"workload": {"kind": "generate"}, "model": "path:trained", "device": device}
    return JobSpec.model_validate(document | {"limits": limits})


def samples(latencies_s: Sequence[float] | Array, ttft_s: float = 0.2) -> dict[str, tuple[float, ...]]:
    """Those of a generate workload whose first token takes a share of each request."""
    times = np.asarray(latencies_s)
    columns = {
        "latency_s": times,
        "requests_per_s": 1 / times,
        "tokens_per_s": 100 / times,
        "tpot_s": times / 100,
        "ttft_s": ttft_s * times,
    }
    return {name: tuple(map(float, values)) for name, values in columns.items()}


def replicate(**changes: Any) -> Replicate:
    """A quiet one: requests of 20 ms, 3% wide, in equal rounds."""
    latencies = 0.02 * np.random.default_rng(0).lognormal(0, 0.03, ROUNDS * REQUESTS)
    made = Replicate(
        ready=Ready(load_s=1, compile_s=None, steady=True, warmup_requests=3, request_s=0.02),
        samples=samples(latencies),
        rounds=(REQUESTS,) * ROUNDS,
        host_samples=(QUIET,) * ROUNDS,
        settled=True,
        audit=Audited(samples=samples([0.021, 0.02, 0.022])),
    )
    return replace(made, **changes)


def seen(**changes: Any) -> Replicate:
    """A replicate that went through four equal rounds with this to be seen."""
    return replicate(host_samples=(replace(QUIET, **changes),) * ROUNDS)


def verdict(
    *replicates: Replicate, job: JobSpec | None = None, metrics: Mapping[str, MetricSummary] | None = None
) -> Verdict:
    """Three replicates unless it is said otherwise, so that nothing but the detectors speaks."""
    job = job or spec()
    quiet = [replicate()] * (3 - len(replicates))
    return judge(job, variants_of(job)[0], evidence([*quiet, *replicates], job), metrics or {})


def evidence(replicates: Sequence[Replicate], job: JobSpec) -> list[Evidence]:
    """The replicates, judged by the fastest probe of all of them."""
    probes = [each.probe_s for one in replicates for each in one.host_samples if each.probe_s]
    yardstick, goal = Yardstick(job.device, min(probes, default=None)), Goal.of(job.measure, 0.02)
    return [
        Evidence(number, each, each.selection(yardstick, goal)) for number, each in enumerate(replicates, 1)
    ]


Tail = Literal["normal", "lognormal", "t3"]

TRUE = 100.0
TAILS: tuple[Tail, ...] = ("normal", "lognormal", "t3")
_BURN_IN = 60
"""Of heavy tails; a normal autoregression may begin as it goes on."""


def noise(rng: np.random.Generator, tail: Tail, shape: tuple[int, ...]) -> Array:
    """Independent numbers with median 0; "lognormal" means that their exponentials are wanted."""
    return rng.standard_t(3, shape) if tail == "t3" else rng.normal(size=shape)


def series(rng: np.random.Generator, tail: Tail, draws: int, requests: int, correlation: float) -> Array:
    """First-order autoregressions, [draws, requests], with the spread of independent noise."""
    if correlation == 0:
        return noise(rng, tail, (draws, requests))
    burn_in = _BURN_IN if tail == "t3" else 0
    shocks = noise(rng, tail, (requests + burn_in, draws))
    values = np.empty_like(shocks)
    values[0] = shocks[0] / np.sqrt(1 - correlation**2)
    for i in range(1, len(shocks)):
        values[i] = correlation * values[i - 1] + shocks[i]
    return np.asarray(values[burn_in:].T * np.sqrt(1 - correlation**2))


def positive(tail: Tail, deviations: Array) -> Array:
    """Times around TRUE: 1% for each deviation, or a factor of e ** 0.3."""
    if tail == "normal":
        return TRUE + deviations
    return np.asarray(TRUE * np.exp((0.3 if tail == "lognormal" else 0.01) * deviations))


def requests(
    rng: np.random.Generator,
    tail: Tail,
    shape: tuple[int, int, int],
    between: float,
    correlation: float = 0.0,
) -> Array:
    """Requests [draws, processes, requests]; `between` is the spread of processes in terms of that within them."""
    draws, processes, count = shape
    within = series(rng, tail, draws * processes, count, correlation).reshape(shape)
    centres = noise(rng, tail, (draws, processes, 1))
    return positive(tail, (between * centres + within) / np.hypot(1.0, between))


def coverage(bounds: tuple[Array, Array], truth: float) -> float:
    """The share of intervals that contain the truth."""
    low, high = bounds
    return float(np.mean((low <= truth) & (truth <= high)))
