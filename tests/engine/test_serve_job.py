"""serve through a measuring process and through a whole job: its samples, its verdict, its sweep."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.child.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.documents.events import Event, VariantFinished
from optigpu.documents.result import Outcome, VerdictReason, VerdictWarning
from optigpu.job.spec import JobSpec
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import Load, Query
from optigpu.load.served import Streaming
from optigpu.measure import run
from optigpu.vocabulary import VariantStatus
from tests.engine.in_process import in_process
from tests.engine.test_replicate import answer, ask, assignment

pytestmark = pytest.mark.usefixtures("forked_children")

MODEL = "preset:tiny-llama-test"
SHAPES = {"kind": "serve", "queries": 6, "prompt_tokens": 4, "prompt_tokens_most": 12, "new_tokens": 3}
MEASURE = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency"]}


def outcomes(tmp_path: Path, workload: dict[str, Any], **changes: Any) -> list[Outcome]:
    heard: list[Outcome] = []

    def listen(event: Event) -> None:
        if isinstance(event, VariantFinished):
            heard.append(event.outcome)

    document = {"workload": SHAPES | workload, "model": MODEL, "measure": MEASURE | changes}
    spec = JobSpec.model_validate(document | {"limits": {"wait_for_quiet_s": 0}})
    run(spec, listen, lock_dir=tmp_path, threads=1)
    return sorted(heard, key=lambda each: each.index)


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload",
    [
        {"rates": [40]},
        {"scenario": "Offline"},
        {"scenario": "SingleStream"},
        {"scenario": "closed", "clients": 2, "slots": 2},
        {
            "scenario": "trace", "queries": None, "prompt_tokens": None, "prompt_tokens_most": None,
            "new_tokens": None, "trace": '{"arrival_s": 0.01, "prompt_tokens": 3, "output_tokens": 4}',
        },
    ],
    ids=lambda each: each.get("scenario", "Server"),
)  # fmt: skip
def test_a_scenario_is_checked_timed_and_told(workload: dict[str, Any]) -> None:
    with in_process() as child:
        child.tell(assignment(SHAPES | workload, MODEL))
        ready = answer(child)
        assert isinstance(ready, Ready), ready
        assert ready.problem is None
        assert ready.facts.load is not None
        assert ready.facts.scenario == workload.get("scenario", "Server")
        heard = ask(child, RunRound(seconds=0, min_requests=2))
        assert isinstance(heard, Round)
        assert {name: len(values) for name, values in heard.samples.items()} == {
            "tokens_per_s": 2,
            "requests_per_s": 2,
        }
        assert len(heard.loads) == 2
        for load in heard.loads:
            assert len(load.sent_s) == len(load.ttft_s) == ready.facts.load.queries
            assert load.law.holds
            assert min(load.ttft_s) > 0
        if workload.get("scenario", "Server") != "trace":
            assert heard.loads[0].prompt_tokens != heard.loads[1].prompt_tokens


@pytest.mark.slow
def test_a_result_can_be_computed_again_from_each_query(tmp_path: Path) -> None:
    (outcome,) = outcomes(tmp_path, {"rates": [60], "ttft_s": 10, "tpot_s": 10}, replicates=2)
    assert outcome.result is not None
    metrics, samples = outcome.result.metrics, outcome.samples
    load = outcome.result.facts.load
    assert load is not None
    assert load.law is not None
    assert load.law.holds
    assert VerdictReason.LITTLES_LAW not in outcome.result.verdict.reasons
    counted = outcome.counted("tokens_per_s")
    for process, rates in enumerate(counted):
        columns = {
            name: np.array(samples[name][process]).reshape(-1, 6)
            for name in ("sent_s", "ttft_s", "tpot_s", "latency_s", "output_tokens")
        }
        ends_s = columns["sent_s"] + columns["latency_s"]
        again = columns["output_tokens"].sum(axis=1) / ends_s.max(axis=1)
        assert again == pytest.approx(rates, rel=0.02)
        decode_s = columns["tpot_s"] * (columns["output_tokens"] - 1)
        assert columns["ttft_s"] + decode_s == pytest.approx(columns["latency_s"])
        waiting = columns["ttft_s"].sum(axis=1) / ends_s.max(axis=1)
        assert samples["queue_length"][process] == pytest.approx(waiting, rel=0.05)
        assert samples["goodput_per_s"][process] == pytest.approx(outcome.counted("requests_per_s")[process])
    medians = [float(np.median(process)) for process in samples["ttft_s"]]
    assert metrics["ttft_s"].value == pytest.approx(float(np.exp(np.mean(np.log(medians)))))
    assert metrics["latency_s"].n == sum(map(len, samples["latency_s"]))
    counts = [float(np.median(process)) for process in samples["queue_length"]]
    assert metrics["queue_length"].value == pytest.approx(float(np.exp(np.mean(np.log(counts)))))


QUIET = HostSample(wall_s=0.4, cpus=2, foreign_s=0.0, idle_s=0.1, steal_s=0.0)
CROWDED = HostSample(wall_s=0.4, cpus=2, foreign_s=0.1, idle_s=0.1, steal_s=0.0)
SWEEP = {"rates": [20_000, 40_000], "queries": 32, "new_tokens": 4, "slots": 2}


def sweep_on_a_machine_that_is(
    sample: HostSample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Outcome]:
    """A real sweep at rates that no engine keeps up with, beside counters that the test hands in."""
    monkeypatch.setattr(HostMonitor, "between", lambda *_: sample)
    return outcomes(tmp_path, SWEEP)


@pytest.mark.slow
def test_a_sweep_stops_at_the_rate_at_which_the_queue_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saturated, left_out = sweep_on_a_machine_that_is(QUIET, tmp_path, monkeypatch)
    assert saturated.result is not None
    assert VerdictWarning.SATURATED in saturated.result.verdict.warnings
    assert left_out.status is VariantStatus.UNSUPPORTED
    assert "20000 requests a second already; 40000 was left out" in (left_out.reason or "")


@pytest.mark.long
def test_on_a_crowded_machine_a_sweep_goes_on_and_saturation_is_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for outcome in sweep_on_a_machine_that_is(CROWDED, tmp_path, monkeypatch):
        assert outcome.result is not None, outcome.reason
        warnings = outcome.result.verdict.warnings
        assert VerdictWarning.SATURATION_UNDECIDED in warnings
        assert VerdictWarning.SATURATED not in warnings


@pytest.mark.slow
def test_the_highest_rate_is_read_with_the_rates_that_were_tried() -> None:
    limits = {"rates": [2000], "ttft_s": 0.5, "queries": 8}
    with in_process() as child:
        child.tell(assignment(SHAPES | limits, MODEL))
        assert isinstance(answer(child), Ready)
        found = ask(child, RunMeter(meter="highest_rate"))
        assert isinstance(found, Metered)
        assert found.values["highest_rate_per_s"] > 0, found
        assert found.facts.recorded["highest_rate_per_s"]["tried"]  # type: ignore[index, call-overload]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "words"),
    [({"rates": [100]}, "needs a limit"), ({"scenario": "Offline", "ttft_s": 1}, "scenario Server")],
)
def test_without_a_limit_or_a_rate_there_is_no_search(workload: dict[str, Any], words: str) -> None:
    with in_process() as child:
        child.tell(assignment(SHAPES | workload, MODEL))
        assert isinstance(answer(child), Ready)
        found = ask(child, RunMeter(meter="highest_rate"))
        assert isinstance(found, Metered)
        assert words in found.reasons["highest_rate_per_s"]


@dataclass(frozen=True)
class OneStream:
    """A completion as a client reports it."""

    sent_s: float
    first_s: float | None
    ended_s: float
    tokens: int
    finished: bool = True
    error: str | None = None
    overdue: bool = False
    ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None


class OneAtATime:
    """A server that answers one stream after the other, and breaks off those with a prompt of 13."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def stream(self, prompt: Sequence[int], new_tokens: int) -> OneStream:
        sent_s = time.perf_counter()
        async with self._turn:
            await asyncio.sleep(0.02)
            first_s = time.perf_counter()
            if prompt[0] == 13:
                return OneStream(sent_s, None, first_s, 0, False, "The server closed the stream half-way.")
            await asyncio.sleep(0.02)
        return OneStream(sent_s, first_s, time.perf_counter(), new_tokens)


@asynccontextmanager
async def connect() -> AsyncIterator[OneAtATime]:
    yield OneAtATime()


def test_streams_are_sent_at_their_moments_and_one_that_breaks_is_counted() -> None:
    load = Load(tuple(Query(number, 0.01 * number, 1, 5) for number in range(4)))
    found = Streaming(connect).run(load, [[1], [1], [13], [1]])
    assert [each.intended_s for each in found.served] == [0, 0.01, 0.02, 0.03]
    assert all(each.late_s >= 0 for each in found.served)
    assert found.served[3].ttft_s > found.served[0].ttft_s
    figures = figures_of(found, Limits(), is_open=True)
    assert (figures.failed, figures.error) == (1, "The server closed the stream half-way.")
    assert (figures.met, figures.law.holds) == (3, True)


def test_clients_of_a_server_send_one_after_the_other() -> None:
    load = Load(tuple(Query(number, 0.0, 1, 5) for number in range(5)), clients=2)
    found = Streaming(connect).run(load, [[1]] * 5)
    assert len(found.served) == 5
    assert sum(each.intended_s == 0 for each in found.served) == 2
    assert max(each.count for each in found.seen) == 2
    assert figures_of(found, Limits(), is_open=False).law.holds
