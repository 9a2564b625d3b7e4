"""What a verdict says of the runs of a load: requests that failed, counts that contradict, a growing queue."""

from dataclasses import replace

import numpy as np
import pytest

from optigpu.conductor.loads import load_measurements, raw_queries
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.verdicts.load import queries
from optigpu.documents.load import QUERY_METRICS, LoadRun
from optigpu.documents.result import VerdictReason, VerdictWarning
from optigpu.load.batching import Batching
from optigpu.load.clock import VirtualClock
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import Schedule
from optigpu.load.simulated import SimulatedSlots
from optigpu.statistics.intervals import summarise
from tests.unit.made_replicates import QUIET, REQUESTS, ROUNDS, evidence, replicate, spec, verdict

RUNS = REQUESTS * ROUNDS
SOURCE = np.random.default_rng(0)


def a_run(rate: float = 10.0) -> LoadRun:
    clock = VirtualClock()
    load = Schedule("Server", 40, (1, 1), (3, 3), rate=rate).draw(SOURCE)
    run = Batching(SimulatedSlots(clock, 1, 0.01, 0.01), clock).run(load, [[0]] * 40)
    return figures_of(run, Limits(), is_open=True)


RUN, GROWING = a_run(), a_run(rate=200.0)


def served(*others: LoadRun) -> Replicate:
    """A replicate of runs that fit together, but for these."""
    return replicate(loads=(*others, *[RUN] * (RUNS - len(others))))


def test_a_single_run_that_breaks_littles_law_is_a_reason() -> None:
    broken = RUN.model_copy(update={"law": RUN.law.model_copy(update={"counted": RUN.law.counted * 1.5})})
    judged = verdict(served(broken))
    assert judged.reasons == (VerdictReason.LITTLES_LAW,)
    assert "Little's law does not hold" in judged.notes[0]


def test_requests_that_failed_are_a_wrong_output() -> None:
    judged = verdict(served(RUN.model_copy(update={"failed": 2, "error": "The server answered HTML"})))
    assert judged.reasons == (VerdictReason.OUTPUT_INVALID,)
    assert judged.notes[0].startswith(f"2 of {40 * RUNS} requests failed: The server answered HTML")


def test_a_queue_that_grows_in_most_runs_is_a_warning() -> None:
    assert GROWING.saturated
    assert verdict(served(GROWING)).warnings == ()
    judged = verdict(served(*[GROWING] * RUNS))
    assert judged.valid
    assert judged.warnings == (VerdictWarning.SATURATED,)
    assert "ask for a lower rate" in judged.notes[0]


def disturbed(*loads: LoadRun, clean: int = 0) -> Replicate:
    """A replicate beside whose rounds, but for the first ones, others used a tenth of a core."""
    busy = replace(QUIET, foreign_s=0.125)
    samples = (QUIET,) * clean + (busy,) * (ROUNDS - clean)
    return replicate(loads=loads, host_samples=samples)


def test_a_queue_that_grows_in_disturbed_rounds_alone_is_undecided() -> None:
    judged = verdict(disturbed(*[GROWING] * RUNS))
    assert VerdictWarning.SATURATED not in judged.warnings
    assert VerdictWarning.SATURATION_UNDECIDED in judged.warnings
    assert "every round was disturbed, which lets a queue grow too" in " ".join(judged.notes)
    assert VerdictWarning.SATURATION_UNDECIDED not in verdict(disturbed(*[RUN] * RUNS)).warnings


def test_one_round_that_nothing_disturbed_says_whether_the_queue_grows() -> None:
    others = [GROWING] * (RUNS - REQUESTS)
    calm = verdict(disturbed(*[RUN] * REQUESTS, *others, clean=1)).warnings
    assert not {VerdictWarning.SATURATED, VerdictWarning.SATURATION_UNDECIDED} & set(calm)
    growing = verdict(disturbed(*[GROWING] * REQUESTS, *others, clean=1)).warnings
    assert VerdictWarning.SATURATED in growing
    assert VerdictWarning.SATURATION_UNDECIDED not in growing


def test_percentiles_have_as_many_samples_as_there_are_requests() -> None:
    proof = evidence([served(), served()], spec())
    assert queries(proof) == 2 * 40 * RUNS
    measured = {each.name: each.samples for each in load_measurements(proof)}
    assert set(measured) == {"ttft_s", "tpot_s", "latency_s", "goodput_per_s", "queue_length"}
    assert [len(process) for process in measured["ttft_s"]] == [40 * RUNS] * 2
    assert [len(process) for process in measured["goodput_per_s"]] == [RUNS] * 2
    assert [len(process) for process in raw_queries(proof)["sent_s"]] == [40 * RUNS] * 2
    assert load_measurements(evidence([replicate()], spec())) == []


@pytest.mark.parametrize("name", QUERY_METRICS)
def test_each_time_of_requests_has_its_percentiles_and_their_bounds(name: str) -> None:
    replicates = [replicate(loads=tuple(a_run() for _ in range(RUNS))) for _ in range(3)]
    proof = evidence(replicates, spec())
    (measurement,) = [each for each in load_measurements(proof) if each.name == name]
    found = summarise(measurement)
    assert (found.n, found.replicates) == (3 * 40 * RUNS, 3)
    every = np.concatenate(measurement.samples)
    percentiles = (found.p50, found.p90, found.p95, found.p99)
    assert percentiles == pytest.approx(np.quantile(every, (0.5, 0.9, 0.95, 0.99)), rel=0.05)
    for percentile, upper in (
        (found.p90, found.p90_upper),
        (found.p95, found.p95_upper),
        (found.p99, found.p99_upper),
    ):
        assert percentile is not None
        assert upper is not None
        assert percentile <= upper < 1.5 * percentile
