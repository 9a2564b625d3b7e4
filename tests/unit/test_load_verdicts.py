"""What a verdict says of the runs of a load, where a sweep over rates ends, and how serve is asked for."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from optigpu.child.messages import Ready
from optigpu.conductor.outcome import load_measurements, raw_queries
from optigpu.conductor.processes.rounds import Replicate
from optigpu.conductor.saturation import Saturation, Watched
from optigpu.conductor.verdicts.judge import counted_queries
from optigpu.documents.facts import ModelFacts, RunFacts
from optigpu.documents.result import VerdictReason, VerdictWarning
from optigpu.documents.rounds import LoadFacts, LoadRun, RoundMark
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Measure, Variant
from optigpu.load.queries import Schedule
from optigpu.models.described import known_facts
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import OptiGPUError, UnsupportedError
from optigpu.workloads.serve import Serve
from tests.unit.made_replicates import QUIET, REQUESTS, ROUNDS, evidence, replicate, spec, verdict
from tests.unit.test_load import figures

RUNS = REQUESTS * ROUNDS
SOURCE = np.random.default_rng(0)


RUN, GROWING = (
    figures(Schedule("Server", 40, (1, 1), (3, 3), rate=rate).draw(SOURCE)) for rate in (10.0, 200.0)
)


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
    assert judged.notes[0].startswith(f"2 of {40 * RUNS + 2} requests failed: The server answered HTML")


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
    assert counted_queries(proof) == 2 * 40 * RUNS
    measured = {each.name: each.samples for each in load_measurements(proof)}
    assert set(measured) == {"ttft_s", "tpot_s", "latency_s", "goodput_per_s", "queue_length"}
    assert [len(process) for process in measured["ttft_s"]] == [40 * RUNS] * 2
    assert [len(process) for process in measured["goodput_per_s"]] == [RUNS] * 2
    assert [len(process) for process in raw_queries(proof)["sent_s"]] == [40 * RUNS] * 2
    assert load_measurements(evidence([replicate()], spec())) == []


MEASURE = Measure(min_seconds=1.0)
CLEAN = Watched((RUN,), (), 0.4)
CLEAN_GROWING = Watched((GROWING,), (), 0.4)
DISTURBED_GROWING = Watched((GROWING,), (RoundMark.OTHERS,), 0.4)
LEFT_OUT = "The queue grew without an end at 10 requests a second already; 20 was left out."


def variants(**changes: object) -> tuple[Variant, ...]:
    beside = [{"backend": "torch", "stack": [{"name": "bf16"}]}]
    document = {"workload": {"kind": "serve", "rates": [10, 20]}, "model": "preset:gpt2", "beside": beside}
    return variants_of(JobSpec.model_validate(document | changes))


def ready(saturated_runs: int) -> Ready:
    load = LoadFacts(scenario="Server", rate=10, queries=40, runs=3, saturated_runs=saturated_runs)
    facts = RunFacts(load=load)
    return Ready(load_s=1, compile_s=None, steady=True, warmup_requests=3, request_s=0.1, facts=facts)


def watching(rounds: Iterable[Watched]) -> Callable[[], Watched]:
    """One after the other; asked for more there is an error."""
    left = iter(rounds)
    return lambda: next(left)


def left_out(rounds: Iterable[Watched], saturated_runs: int = 3) -> str | None:
    """Why the second rate is left out, if the sweep ends at the first, which never is."""
    first, second = (each for each in variants() if not each.stack)
    found = Saturation()
    found.judge(first, ready(saturated_runs), MEASURE, watching(rounds))
    found.require_below(first)
    try:
        found.require_below(second)
    except UnsupportedError as error:
        return str(error)
    return None


def test_a_warm_up_whose_queue_does_not_grow_needs_no_round() -> None:
    assert left_out([], saturated_runs=1) is None


def test_a_clean_round_decides() -> None:
    assert left_out([CLEAN_GROWING]) == LEFT_OUT
    assert left_out([CLEAN]) is None


def test_a_disturbed_round_is_measured_again_and_ends_nothing() -> None:
    assert left_out([DISTURBED_GROWING, DISTURBED_GROWING, CLEAN_GROWING]) == LEFT_OUT
    assert left_out([DISTURBED_GROWING, CLEAN]) is None


def test_without_a_clean_round_in_the_time_the_sweep_goes_on() -> None:
    asked = iter([DISTURBED_GROWING] * 100)
    assert left_out(asked) is None
    assert len(list(asked)) == 95, "2 s of rounds of 0.4 s"


def test_another_stack_and_another_server_have_sweeps_of_their_own() -> None:
    found = Saturation()
    plain, _, _, bf16 = sorted(variants(), key=lambda each: (len(each.stack), each.index))
    found.judge(plain, ready(3), MEASURE, watching([CLEAN_GROWING]))
    found.require_below(bf16)

    def at(port: int) -> tuple[Variant, ...]:
        return variants(backend="endpoint", endpoint=f"http://127.0.0.1:{port}#tiny", beside=[])

    found.judge(at(8001)[0], ready(3), MEASURE, watching([CLEAN_GROWING]))
    found.require_below(at(8002)[1])
    with pytest.raises(UnsupportedError):
        found.require_below(at(8001)[1])


LINE = '{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2}'


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rates": [0]}, "rates.0: 0 is too small"),
        ({"rates": [1e9]}, "rates.0: 1000000000 is too large; the most is 100000"),
        ({"rates": ["NaN"]}, "rates.0"),
        ({"rates": []}, "rates: It has too few items"),
        ({"rates": [2, 1]}, "the lowest first"),
        ({"rates": None}, "the scenario Server needs rates"),
        ({"scenario": "Offline", "rates": [1]}, "rates is of the scenario Server"),
        ({"scenario": "closed"}, "the scenario closed needs clients"),
        ({"clients": 2}, "clients is of the scenario closed"),
        ({"ttft_s": 0}, "ttft_s: 0 is too small; it must be more than 0"),
        ({"new_tokens": 1}, "new_tokens: 1 is too small"),
        ({"new_tokens": 8, "new_tokens_most": 4}, "new_tokens_most is less than new_tokens"),
        ({"queries": None}, "the scenario Server needs queries"),
        ({"scenario": "trace"}, "the scenario trace needs trace"),
        ({"trace": LINE}, "trace is of the scenario trace"),
        ({"scenario": "trace", "trace": LINE + "\n{"}, "line 2 of the trace is wrong"),
        (
            {"scenario": "trace", "trace": LINE.replace("0,", "-3,")},
            "line 1 of the trace is wrong: arrival_s",
        ),
        ({"scenario": "server"}, "scenario"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_field(given: dict[str, Any], words: str) -> None:
    with pytest.raises((OptiGPUError, ValidationError, ValueError)) as error:
        JobSpec.model_validate({"workload": {"kind": "serve"} | given, "model": "preset:gpt2"})
    assert words in str(error.value)


def test_the_longest_query_must_fit_the_context() -> None:
    facts = known_facts(parse_reference("preset:gpt2"))
    assert isinstance(facts, ModelFacts)
    assert Serve(prompt_tokens=512, new_tokens=512).check(facts) is None
    assert "1025" in (Serve(prompt_tokens=512, prompt_tokens_most=513, new_tokens=512).check(facts) or "")


@pytest.mark.parametrize("name", ["static_kv_cache", "no_kv_cache", "torch_compile", "speculative_decoding"])
def test_a_technique_of_whole_batches_is_refused_when_the_job_is_posted(name: str) -> None:
    with pytest.raises((OptiGPUError, ValueError), match="sequences join and leave"):
        JobSpec.model_validate(
            {"workload": {"kind": "serve"}, "model": "preset:gpt2", "stack": [{"name": name}]}
        )
