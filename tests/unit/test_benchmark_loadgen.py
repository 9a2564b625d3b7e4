"""MLPerf's LoadGen beside serve: each query goes both ways once, and the figures are read."""

import json
from pathlib import Path

import pytest

from benchmarks.loadgen import NEW_TOKENS, TimedSlots, by_loadgen, by_serve, main
from optigpu.vocabulary import OptiGPUError


@pytest.mark.slow
@pytest.mark.loadgen
def test_what_loadgen_sends_is_served_and_replayed() -> None:
    figures, sent = by_loadgen(TimedSlots(4), 100.0, 20, [0], seed=1)
    assert len(sent.served) == 20
    assert {served.count for served in sent.served} == {NEW_TOKENS}
    assert figures.p99_s > 0
    assert by_serve(TimedSlots(4), sent, [0]).requests_per_s > 0


@pytest.mark.slow
@pytest.mark.loadgen
def test_the_figures_of_both_are_written(tmp_path: Path) -> None:
    path = tmp_path / "loadgen.json"
    assert main(["--queries", "10", "--turns", "1", "--rate", "100", "--output", str(path)]) in (0, 1)
    document = json.loads(path.read_text())
    assert len(document["loadgen"]) == len(document["serve"]) == 1
    assert set(document["apart"]) == {"p99_s", "requests_per_s"}


def test_a_summary_of_another_version_is_refused() -> None:
    from benchmarks.loadgen import _summarised

    with pytest.raises(OptiGPUError, match="has no line like"):
        _summarised("Result is : VALID")
    found = _summarised("99.00 percentile latency (ns)   : 2000000\nCompleted samples per second    : 7.5\n")
    assert (found.p99_s, found.requests_per_s) == (0.002, 7.5)
