"""A load on a simulated engine with its own clock: what theory says, and the search for the highest rate."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from optigpu.documents.rounds import LittlesLaw, LoadRun
from optigpu.load.batching import Batching, VirtualClock
from optigpu.load.figures import Limits, figures_of, littles_law
from optigpu.load.queries import Load, Query, Schedule, poisson, read_trace
from optigpu.load.served import Run, Seen
from optigpu.meters.highest_rate import CLOSE_ENOUGH, SimulatedSlots, highest_rate
from optigpu.vocabulary import SpecError
from tests.breadth import cases

STEP_S = 0.01
SERVER = Schedule("Server", 400, (1, 1), (5, 5), rate=10.0)


def simulated(load: Load, slots: int = 1, stalls: tuple[tuple[float, float], ...] = ()) -> Run:
    clock = VirtualClock()
    engine = SimulatedSlots(clock, slots, STEP_S, STEP_S, stalls)
    return Batching(engine, clock).run(load, [[0]] * len(load.queries))


def figures(load: Load, **given: object) -> LoadRun:
    return figures_of(simulated(load, **given), Limits(), is_open=load.clients is None)  # type: ignore[arg-type]


def together(load: Load, slots: int) -> dict[int, tuple[float, float]]:
    """The same of several places: all that have come join, then each has a token."""
    now, ahead = 0.0, list(load.queries)
    queue: list[Query] = []
    left: dict[int, int] = {}
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    while ahead or queue or left:
        if not queue and not left:
            now = max(now, ahead[0].arrival_s)
        while ahead and ahead[0].arrival_s <= now:
            queue.append(ahead.pop(0))
        while queue and len(left) < slots:
            now += STEP_S
            query = queue.pop(0)
            first[query.number], left[query.number] = now, query.new_tokens - 1
        now += STEP_S
        for number in [*left]:
            left[number] -= 1
            if not left[number]:
                del left[number]
                ended[number] = now
    return {number: (first[number], ended[number]) for number in first}


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_so_is_one_whose_sequences_join_and_leave(slots: int) -> None:
    load = replace(SERVER, rate=60.0, new_tokens=(2, 9)).draw(np.random.default_rng(2))
    expected = together(load, slots)
    for served in simulated(load, slots=slots).served:
        first_s, ended_s = expected[served.query.number]
        assert (served.first_s, served.ended_s) == pytest.approx((first_s, ended_s))
        assert served.count == served.query.new_tokens


@pytest.mark.slow
@pytest.mark.parametrize("load_share", cases([0.7, 0.3], by_default=1))
def test_the_mean_wait_is_that_of_queueing_theory(load_share: float) -> None:
    """M/D/1: a wait of D x / (2 (1 - x)), by Pollaczek and Khinchin."""
    service_s = 2 * STEP_S
    source = np.random.default_rng(3)
    schedule = Schedule("Server", 20_000, (1, 1), (2, 2), rate=load_share / service_s)
    runs = [figures(schedule.draw(source)) for _ in range(4)]
    wait_s = float(np.mean([each - STEP_S for run in runs for each in run.ttft_s]))
    assert wait_s == pytest.approx(service_s * load_share / (2 * (1 - load_share)), rel=0.08)
    assert not any(run.saturated for run in runs)


def test_arrivals_are_exponentially_apart_and_add_up_to_the_rate() -> None:
    moments = poisson(5.0, 20_000, np.random.default_rng(4))
    gaps = np.diff([0.0, *moments])
    assert gaps.min() >= 0
    assert moments[-1] == pytest.approx(4000, rel=0.001)
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(gaps, share) == pytest.approx(-math.log(1 - share) / 5, rel=0.05)
    assert poisson(5.0, 10, np.random.default_rng(5)) == poisson(5.0, 10, np.random.default_rng(5))


def test_a_stall_that_a_closed_loop_hides_is_seen_where_queries_keep_coming() -> None:
    """One client waits with the server, and only one of its queries is slow. Those that would have come meanwhile are
    not sent, and so not slow: coordinated omission."""
    stall = ((5.0, 10.0),)
    arriving = figures(SERVER.draw(np.random.default_rng(6)), stalls=stall)
    waiting = figures(replace(SERVER, scenario="closed").draw(np.random.default_rng(6)), stalls=stall)
    assert np.percentile(waiting.latency_s, 99) == pytest.approx(5 * STEP_S)
    assert max(waiting.latency_s) > 10
    assert np.percentile(arriving.latency_s, 90) > 5
    assert np.percentile(arriving.latency_s, 50) < 5
    assert arriving.law.holds
    assert waiting.law.holds


@pytest.mark.parametrize("scenario", ["Server", "Offline", "SingleStream", "closed"])
def test_littles_law_holds_in_every_scenario(scenario: str) -> None:
    schedule = replace(SERVER, scenario=scenario, clients=3, rate=70.0)  # type: ignore[arg-type]
    law = figures(schedule.draw(np.random.default_rng(8)), slots=2).law
    assert law.holds
    assert law.counted == pytest.approx(law.expected)


def test_littles_law_fails_where_a_query_is_lost_or_counted_twice() -> None:
    run = simulated(SERVER.draw(np.random.default_rng(9)))
    assert littles_law(run.served, run.seen, run.seconds).holds
    assert not littles_law(run.served[:-1], run.seen, run.seconds).holds
    assert not littles_law([*run.served, run.served[0]], run.seen, run.seconds).holds
    stuck = [Seen(each.moment_s, each.count + 1) for each in run.seen]
    assert not littles_law(run.served, stuck, run.seconds).holds
    assert not LittlesLaw(counted=2, rate=1, latency_s=1, late_s=0, tolerance=0.5).holds


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "grows"), cases([(16.0, False), (26.0, True), (10.0, False), (60.0, True)]))
def test_a_queue_that_grows_is_told_from_one_that_comes_and_goes(rate: float, grows: bool) -> None:
    """The engine serves 20 a second."""
    source = np.random.default_rng(10)
    found = [figures(replace(SERVER, rate=rate).draw(source)).saturated for _ in range(40)]
    assert sum(map(bool, found)) >= 39 if grows else sum(map(bool, found)) <= 1


TRACE = """{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2}

{"arrival_s": 0.5, "prompt_tokens": 4, "output_tokens": 6}
"""


def test_a_trace_is_replayed_as_it_is_written() -> None:
    queries = read_trace(TRACE)
    assert queries == (Query(0, 0.0, 3, 2), Query(1, 0.5, 4, 6))
    load = Schedule("trace", 2, (1, 1), (2, 2), trace=queries).draw(np.random.default_rng(0))
    assert [each.intended_s for each in simulated(load).served] == [0, 0.5]


def test_traces_of_others_are_read() -> None:
    moon = '{"timestamp": 1500, "input_length": 600, "output_length": 4, "hash_ids": [7, 9]}'
    assert read_trace(moon) == (Query(0, 1.5, 600, 4, (7, 9)),)
    guide = '{"prompt": "a b", "prompt_tokens_count": 2, "output_tokens_count": 3}'
    assert read_trace(guide) == (Query(0, 0.0, 2, 3),)


CHAT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "one two"},
    {"from": "gpt", "value": "three four five"},
    {"from": "human", "value": "six", "weight": 1},
    {"from": "gpt", "value": "seven"},
    {"from": "human", "value": "no answer"},
]


@pytest.mark.parametrize("form", ["array", "lines"])
def test_each_answer_of_a_conversation_is_a_request_after_all_that_was_said(form: str) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"id": "a", "conversations": CHAT}, {"tools": tools, "conversations": CHAT[1:3]}]
    text = json.dumps(rows, indent=1) if form == "array" else "\n".join(map(json.dumps, rows))
    first, second, other = read_trace(text)
    assert [each.after for each in (first, second, other)] == [None, 0, None]
    assert second.texts == ("be brief", "one two", "three four five", "six", "seven")
    assert other.texts[0] == json.dumps(tools)
    encoded = [each.encoded(lambda text: [len(word) for word in text.split()]) for each in (first, second)]
    assert [(each.prompt_tokens, each.new_tokens) for each in encoded] == [(4, 3), (9, 2)]
    assert encoded[1].prompt == (2, 5, 3, 3, 5, 4, 4, 3, 3)
    with pytest.raises(SpecError, match="no answer follows"):
        read_trace('{"conversations": [{"from": "human", "value": "a"}]}')


def test_a_turn_follows_the_answer_that_was_given() -> None:
    queries = (Query(0, 0.0, 2, 3), Query(1, 0.0, 6, 2, after=0), Query(2, 0.0, 2, 40))
    prompts = [[1, 2], [1, 2, 9, 9, 9, 7], [3, 4]]
    clock = VirtualClock()
    run = Batching(SimulatedSlots(clock, 4, STEP_S, STEP_S), clock).run(Load(queries), prompts)
    first, second, _ = sorted(run.served, key=lambda each: each.query.number)
    assert second.intended_s == first.ended_s
    assert prompts[1] == [1, 2, *first.tokens, 7] == [1, 2, 0, 0, 0, 7]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"arrival_s": 1', "line 4 of the trace is wrong"),
        ('{"arrival_s": -1, "prompt_tokens": 3, "output_tokens": 2}', "arrival_s: -1"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 2}', "prompt_tokens: 0 is too small"),
        ('{"arrival_s": 1, "prompt_tokens": 3}', "output_tokens: This field is required"),
        (
            '{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 2, "x": 1}',
            "line 4 of the trace is wrong: x",
        ),
        ('{"arrival_s": NaN, "prompt_tokens": 3, "output_tokens": 2}', "line 4 of the trace is wrong"),
        (
            '{"arrival_s": 0.4, "prompt_tokens": 3, "output_tokens": 2}',
            "line 4 of the trace arrives at 0.4 s",
        ),
        ("[]", "line 4 of the trace is wrong"),
        (
            '{"arrival_s": 1, "prompt_tokens": 3, "prompt_tokens": 5, "output_tokens": 2}',
            "line 4 of the trace is wrong: it is not JSON: the key 'prompt_tokens' occurs twice.",
        ),
        (
            '\ufeff{"arrival_s": 1, "prompt_tokens": 3, "output_tokens": 2}',
            "line 4 of the trace is wrong: it begins with a byte order mark, which JSON does not have",
        ),
        ("[" * 100_000, "line 4 of the trace is wrong: it is nested too deeply."),
        ('{"\ud800": 1}', "line 4 of the trace is wrong: it is not UTF-8 at byte 2."),
    ],
)
def test_a_broken_line_of_a_trace_is_named(line: str, words: str) -> None:
    with pytest.raises(SpecError) as error:
        read_trace(TRACE + line + "\n" + "more")
    assert words in str(error.value)


def a_run(met: int, of: int = 100, *, saturated: bool = False) -> LoadRun:
    law = LittlesLaw(counted=1, rate=1, latency_s=1, late_s=0, tolerance=0)
    moments = (1.0,) * of
    return LoadRun(
        seconds=1, sent_s=moments, prompt_tokens=(1,) * of, output_tokens=(2,) * of, ttft_s=moments, tpot_s=moments,
        latency_s=moments, goodput_per_s=met, met=met, waiting=0, queue=(), saturated=saturated, law=law,
    )  # fmt: skip


@pytest.mark.parametrize("first", [1.0, 7.0, 100.0])
def test_it_ends_close_to_a_sharp_edge_from_either_side(first: float) -> None:
    found = highest_rate(lambda rate: a_run(100 if rate <= 20 else 0), first, share=0.99, runs=3, most=1000)
    assert found.rate <= 20 < (found.high or 0)
    assert (found.high or 0) <= CLOSE_ENOUGH * found.rate * 1.0001
    assert found.low == found.rate
    assert all(tried.runs == 3 for tried in found.tried)


def test_runs_that_disagree_make_the_interval_wide() -> None:
    calls: dict[float, int] = {}

    def uncertain(rate: float) -> LoadRun:
        calls[rate] = calls.get(rate, 0) + 1
        holds = rate < 10 or (rate < 30 and calls[rate] % 3 != 0)
        return a_run(100 if holds else 0)

    found = highest_rate(uncertain, 2, share=0.99, runs=3, most=1000)
    assert found.low < 10 < found.rate <= 30 <= (found.high or 0)


def test_a_growing_queue_does_not_hold_though_all_met_the_limits() -> None:
    found = highest_rate(lambda rate: a_run(100, saturated=rate > 4), 1, share=0.99, runs=1, most=64)
    assert found.rate == pytest.approx(4, rel=0.1)


def test_where_no_rate_holds_it_is_zero_and_ends() -> None:
    found = highest_rate(lambda _: a_run(98), 64, share=0.99, runs=1, most=1000)
    assert (found.rate, found.low, found.high) == (0, 0, 1)
    assert len(found.tried) == 7


@pytest.mark.slow
def test_with_a_limit_it_stays_below_the_rate_of_an_engine() -> None:
    """It serves 50 a second, one after the other, and 99% of the waits must be within three services."""
    source = np.random.default_rng(0)
    schedule = Schedule("Server", 2000, (1, 1), (2, 2))

    def attempt(rate: float) -> LoadRun:
        run = simulated(replace(schedule, rate=rate).draw(source))
        return figures_of(run, Limits(ttft_s=0.07), is_open=True)

    found = highest_rate(attempt, 10, share=0.99, runs=3, most=1000)
    assert 15 < found.rate < 40
