"""MLPerf's LoadGen beside serve: each query goes both ways once, and the figures are read."""

import json
from pathlib import Path

import pytest

from benchmarks.loadgen import (
    NEW_TOKENS,
    Engine,
    Figures,
    TimedSlots,
    Turn,
    apart,
    by_loadgen,
    by_serve,
    main,
)
from optigpu.vocabulary import OptiGPUError


@pytest.mark.slow
@pytest.mark.loadgen
def test_what_loadgen_sends_is_served_and_replayed() -> None:
    engine = Engine(TimedSlots(4), [0])
    figures, queries = by_loadgen(engine, 100.0, 20, seed=1)
    assert figures.p99_s > 0
    assert [query.number for query in queries] == list(range(20))
    assert {query.new_tokens for query in queries} == {NEW_TOKENS}
    arrivals_s = [query.arrival_s for query in queries]
    assert arrivals_s == sorted(arrivals_s)
    assert arrivals_s[0] == 0
    again = by_loadgen(engine, 100.0, 20, seed=1)[1]
    assert [query.arrival_s for query in again] == pytest.approx(arrivals_s, abs=1e-5)
    assert by_serve(engine, queries).requests_per_s > 0
    engine.close()


@pytest.mark.slow
@pytest.mark.loadgen
def test_the_figures_of_both_are_written(tmp_path: Path) -> None:
    path = tmp_path / "loadgen.json"
    asked = ["--queries", "10", "--turns", "1", "--rate", "100", "--output", str(path)]
    assert main(asked) in (0, 1)
    assert main([*asked, "--resume"]) in (0, 1)
    document = json.loads(path.read_text())
    assert [set(turn) for turn in document["turns"]] == [{"loadgen", "serve", "again"}] * 2
    assert set(document["apart"]) == set(document["replays_apart"]) == {"p99_s", "requests_per_s"}
    with pytest.raises(OptiGPUError, match="nothing of the same job"):
        main([*asked, "--rate", "50", "--resume"])


def test_the_sides_are_compared_turn_by_turn() -> None:
    turns = [
        Turn(Figures(100.0, 1.0), Figures(101.0, 1.0), Figures(101.0, 2.0)),
        Turn(Figures(1.0, 1.0), Figures(1.05, 1.0), Figures(1.05, 3.0)),
        Turn(Figures(2.0, 1.0), Figures(2.04, 1.0), Figures(2.04, 4.0)),
    ]
    assert apart(turns, "p99_s", "serve", "loadgen") == pytest.approx(0.02)
    assert apart(turns, "requests_per_s", "again", "serve") == pytest.approx(2.0)


def test_a_schedule_is_read_from_the_trace_in_the_order_of_its_moments() -> None:
    from benchmarks.loadgen import _schedule

    lines = [
        '{"traceEvents":[',
        '{"name":"Latency","ph": "C","pid":7,"ts":250.125,"args":{ "issue_delay":1,"issue_to_done":2}},',
        '{"name":"Sample","cat":"default","ph":"b","pid":7,"id":1,"ts":2000250.125,"args":{"sample_seq":1}},',
        '{"name":"Sample","cat":"default","ph":"e", "pid":7,"id":1,"ts":2300000.000},',
        '{"name":"Sample","cat":"default","ph":"b","pid":7,"id":0,"ts":250.125,"args":{"sample_seq":0}},',
        '{"name":"Sample","cat":"default","ph":"e", "pid":7,"id":0,"ts":9000.000},',
    ]
    found = _schedule("\n".join(lines), 2)
    assert [(query.number, query.arrival_s) for query in found] == [(0, 0.0), (1, pytest.approx(2.0))]
    with pytest.raises(OptiGPUError, match="has 2 samples instead of 3"):
        _schedule("\n".join(lines), 3)


def test_a_summary_of_another_version_is_refused() -> None:
    from benchmarks.loadgen import _summarised

    with pytest.raises(OptiGPUError, match="has no line like"):
        _summarised("Result is : VALID")
    found = _summarised("99.00 percentile latency (ns)   : 2000000\nCompleted samples per second    : 7.5\n")
    assert (found.p99_s, found.requests_per_s) == (0.002, 7.5)
