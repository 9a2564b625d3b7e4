"""What measuring processes report as raw records: the rounds of a replicate, and runs of a load.

Of a round, what disturbed it and whether figures come from it; of a load, each query's moments and what the queue did.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Literal, TypeVar

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


ScenarioName = Literal["Server", "Offline", "SingleStream", "closed", "trace"]
"""Server, Offline and SingleStream are MLPerf Inference's; closed are clients that send one after the other."""
QUERY_METRICS = ("ttft_s", "tpot_s", "latency_s")
"""The metrics that each query of a run has a sample of."""


class LittlesLaw(Frozen):
    """How many queries were under way on average: counted, and as it follows from their rate and their latency. The two
    are equal once the latency, which counts from when a query was to be sent, is without `late_s`, the mean time until
    the server could count it. `tolerance` is half of what the shortest query adds to the average, so that a single one
    that is lost or counted twice shows. Source: Little, A Proof for the Queuing Formula L = lambda W, 1961."""

    counted: float
    rate: float
    latency_s: float
    late_s: float
    tolerance: float

    @property
    def expected(self) -> float:
        """Lambda times W."""
        return self.rate * (self.latency_s - self.late_s)

    @property
    def holds(self) -> bool:
        """Whether the two differ by no more than the tolerance."""
        return abs(self.counted - self.expected) <= self.tolerance


class LoadRun(Frozen):
    """One run. The tuples have an item for each query that was answered, in the order of `sent_s`: when each was to be
    sent, in seconds from the begin; those that failed are counted alone. `goodput_per_s` are the queries a second that
    met the limits. `waiting` is the mean number of queries without a first token, `queue` that number over time: pairs
    of a moment and a number. `growth` is by how much it grew in each second of the arrivals, and `saturated` whether
    without an end: null where queries wait for earlier ones, or all come at once."""

    seconds: float
    sent_s: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    latency_s: tuple[float, ...]
    goodput_per_s: float
    met: int
    waiting: float
    queue: tuple[tuple[float, float], ...]
    growth: float | None = None
    saturated: bool | None = None
    law: LittlesLaw
    failed: int = 0  # queries that were not answered as they should have been
    error: str | None = None  # what the first of them says

    @property
    def queries(self) -> int:
        """How many were sent."""
        return len(self.sent_s) + self.failed

    @property
    def met_share(self) -> float:
        """The share of the queries that met the limits."""
        return self.met / self.queries


def grew_in_most(runs: Sequence[LoadRun]) -> bool:
    """Whether the queue grew without an end in most of the runs of which it is known."""
    known = [run.saturated for run in runs if run.saturated is not None]
    return 2 * sum(known) > len(known)


class AloneAgreement(Frozen):
    """Requests of a run that were decoded again, each by itself, and how much of what they were given is the same."""

    requests: int
    same_requests: int
    tokens: int
    same_tokens: int
    most_at_once: int  # how many requests were under way at once in that run, at most

    @property
    def share(self) -> float:
        """The share of the tokens that are the same."""
        return self.same_tokens / self.tokens


class LoadFacts(Frozen):
    """The runs of a result, in one."""

    scenario: ScenarioName
    rate: float | None = None  # queries a second that were offered; null where no schedule says it
    clients: int | None = None
    queries: int  # of each run
    slots: int | None = None  # of the cache of an engine in the process; null for a server's own
    block_tokens: int | None = None
    runs: int = 0  # that were measured
    saturated_runs: int | None = None  # in which the queue grew without an end
    law: LittlesLaw | None = None  # Little's law of the run where it fits worst
    queue: tuple[tuple[float, float], ...] = ()  # of the last run: pairs of a moment in s and a number

    @property
    def is_saturated(self) -> bool:
        """Whether the queue grew without an end in most runs."""
        return 2 * (self.saturated_runs or 0) > self.runs
