"""serve through a measuring process, by servers that the test starts, and as a whole job: samples, verdict, sweep."""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from optigpu.backends.endpoint.client import Completions, Server
from optigpu.child.messages import Assignment, Metered, Ready, Refused, Round, RunMeter, RunRound
from optigpu.cli import app
from optigpu.conductor.verdicts.host_monitor import HostMonitor, HostSample
from optigpu.documents.events import Event, VariantFinished
from optigpu.documents.result import Outcome, VerdictReason, VerdictWarning
from optigpu.documents.rounds import LoadFacts, LoadRun
from optigpu.job.spec import JobSpec
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import Load, Query
from optigpu.load.served import Streaming
from optigpu.measure import run
from optigpu.vocabulary import OptiGPUError, VariantStatus
from tests.engine.machines import here
from tests.engine.measuring import in_process
from tests.engine.processes import optigpu
from tests.engine.test_cli_run import MEASURED, QUICK
from tests.engine.test_endpoint_client import REASONS, closing_half_way, garbage, hanging
from tests.engine.test_endpoint_job import closing_later
from tests.engine.test_replicate import answer, ask, assigned, assignment
from tests.servers.completions import EVENTS, Asked, Behave, Reply, serving, whole

pytestmark = pytest.mark.usefixtures("forked_children")
MODEL = "preset:tiny-llama-test"
SMALL_SHAPES = {"kind": "serve", "queries": 6, "prompt_tokens": 4, "prompt_tokens_most": 12, "new_tokens": 3}
MEASURE = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency"]}


def outcomes(tmp_path: Path, workload: dict[str, Any], **changes: Any) -> list[Outcome]:
    heard: list[Outcome] = []

    def listen(event: Event) -> None:
        if isinstance(event, VariantFinished):
            heard.append(event.outcome)

    document = {"workload": SMALL_SHAPES | workload, "model": MODEL, "measure": MEASURE | changes}
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
        child.tell(assignment(SMALL_SHAPES | workload, MODEL))
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


@pytest.mark.long
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


PROMPT, NEW = list(range(6)), 5
SHAPES = {"kind": "serve", "queries": 6, "prompt_tokens": 4, "prompt_tokens_most": 12, "new_tokens": 12}
SERVER = {"rates": [2000]}
CLIENTS = {"scenario": "closed", "clients": 3}


def of_server(workload: dict[str, Any], url: str) -> Assignment:
    document = {"workload": SHAPES | workload, "model": "bundled:tiny", "backend": "endpoint"}
    spec = JobSpec.model_validate(document | {"endpoint": f"{url}#tiny"})
    return assigned(spec, here()).model_copy(update={"folder": tempfile.mkdtemp()})


def ready(workload: dict[str, Any], behave: Behave) -> Ready:
    """What a measuring process says of such a server."""
    with serving(behave) as server, in_process() as child:
        child.tell(of_server(workload, server.url))
        found = answer(child)
        assert isinstance(found, Ready), found
        return found


class Telling:
    """Tells the ids of its tokens, which follow from the prompt; or, if it is `confused`, from what runs beside too."""

    def __init__(self, *, confused: bool) -> None:
        self._confused, self._running = confused, 0

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        prompt = asked.body["prompt"]
        assert isinstance(prompt, list)
        self._running += 1
        await reply.head(200, EVENTS)
        for number in range(asked.new_tokens):
            await asyncio.sleep(0.002)
            token = sum(prompt) + number + (self._running if self._confused else 1)
            ends = "length" if number == asked.new_tokens - 1 else None
            await reply.token(f" t{number}", ends, ids=[token])
        self._running -= 1
        await reply.usage(asked.new_tokens, asked.prompt_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("workload", [SERVER, CLIENTS], ids=["Server", "closed"])
def test_a_server_is_checked_timed_and_told(workload: dict[str, Any]) -> None:
    with serving(whole) as server, in_process() as child:
        child.tell(of_server(workload, server.url))
        found = answer(child)
        assert isinstance(found, Ready), found
        assert found.problem is None
        assert found.facts.scenario == workload.get("scenario", "Server")
        heard = ask(child, RunRound(seconds=0, min_requests=2))
        assert isinstance(heard, Round)
        assert [len(load.sent_s) for load in heard.loads] == [6, 6]
        for load in heard.loads:
            assert (load.failed, load.met, load.law.holds) == (0, 6, True)
            assert set(load.output_tokens) == {12}
        metered = ask(child, RunMeter(meter="quality"))
        assert isinstance(metered, Metered)
        assert "does not tell which tokens it decoded" in metered.reasons["alone_agreement"]


SAID = [("human", "Who was the king of France?"), ("gpt", "It was a long list."), ("human", "Name two.")]
SAID += [("gpt", "Louis and Charles, both.")]
TALK = json.dumps([{"conversations": [{"from": who, "value": text} for who, text in SAID]}] * 2)
TALKING: dict[str, Any] = {"kind": "serve", "scenario": "trace", "trace": TALK}


@pytest.mark.slow
def test_conversations_go_on_from_the_answers_of_a_server() -> None:
    spec = {"workload": TALKING, "model": "bundled:tiny", "backend": "endpoint"}
    with serving(Telling(confused=False)) as server, in_process() as child:
        asked = JobSpec.model_validate(spec | {"endpoint": f"{server.url}#tiny"})
        child.tell(assigned(asked, here()).model_copy(update={"folder": tempfile.mkdtemp()}))
        found = answer(child)
        assert isinstance(found, Ready), found
        assert (found.problem, found.facts.scenario) == (None, "trace")
        bodies: list[Any] = [each.body for each in server.completions()[-4:]]
    *firsts, second, _ = sorted(bodies, key=lambda body: len(body["prompt"]))
    begin = firsts[0]["prompt"]
    given = [sum(begin) + number + 1 for number in range(firsts[0]["max_tokens"])]
    assert second["prompt"][: len(begin) + len(given)] == [*begin, *given]


@pytest.mark.slow
def test_conversations_are_decoded_by_an_engine_here_and_need_a_tokenizer() -> None:
    for model, kind in (("bundled:tiny", Ready), (MODEL, Refused)):
        with in_process() as child:
            child.tell(assignment(TALKING, model))
            assert isinstance(answer(child), kind)


@pytest.mark.slow
@pytest.mark.parametrize("confused", [False, True])
def test_the_tokens_that_a_server_tells_are_compared_with_those_of_each_request_alone(confused: bool) -> None:
    with serving(Telling(confused=confused)) as server, in_process() as child:
        child.tell(of_server(CLIENTS, server.url))
        assert isinstance(answer(child), Ready)
        metered = ask(child, RunMeter(meter="quality"))
        assert isinstance(metered, Metered)
        noted: Any = metered.facts.recorded["alone_agreement"]
        assert (noted["requests"], noted["tokens"], noted["most_at_once"]) == (6, 72, 3)
        share = metered.values["alone_agreement"]
        assert share < 0.7 if confused else share == 1.0


def under_load(behave: Behave, time_limit_s: float = 20.0) -> LoadRun:
    """One run of two requests."""
    load = Load((Query(0, 0.0, 6, NEW), Query(1, 0.01, 6, NEW)))
    with serving(behave) as server:
        asked = Server(f"{server.url}/v1", "tiny", time_limit_s=time_limit_s)
        run = Streaming(lambda: Completions(asked)).run(load, [PROMPT, PROMPT])
    return figures_of(run, Limits(), is_open=True)


@pytest.mark.parametrize("behave", [closing_half_way, garbage])
def test_each_request_that_a_server_fails_is_counted_with_its_reason(behave: Behave) -> None:
    found = under_load(behave)
    assert (found.failed, found.met, found.goodput_per_s) == (2, 0, 0.0)
    assert found.error == REASONS[behave]
    assert found.law.holds


@pytest.mark.slow
def test_a_server_that_hangs_ends_the_run_at_the_time_limit_of_one_request() -> None:
    words = r"had not ended its answer after 0\.3 s, with 0 chunks of text received\."
    with pytest.raises(OptiGPUError, match=words):
        under_load(hanging, time_limit_s=0.3)
    one_by_one = Load(tuple(Query(number, 0.0, 6, NEW) for number in range(100)), clients=1)
    with serving(hanging) as server:
        asked = Server(f"{server.url}/v1", "tiny", time_limit_s=0.3)
        streaming = Streaming(lambda: Completions(asked))
        with pytest.raises(OptiGPUError, match=words):
            streaming.run(one_by_one, [PROMPT] * 100)
        assert len(server.completions()) == 1, "the others would hang as well"


class EverySecond:
    """Closes the stream of every second request of a load half-way."""

    def __init__(self) -> None:
        self._count = 0

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        self._count += asked.new_tokens >= 10
        await (closing_later if self._count % 2 else whole)(asked, reply)


@pytest.mark.slow
def test_a_server_that_fails_some_requests_has_a_wrong_output() -> None:
    problem = ready(CLIENTS, EverySecond()).problem
    assert problem is not None
    assert problem.startswith("3 of 6 requests failed: The server closed the stream before the completion's")


QUERIES, NEW_EACH, QUALITY_TOKENS = 132, 2, 64
LOAD = (
    *(
        "--scenario",
        "closed",
        "--clients",
        "8",
        "--queries",
        str(QUERIES),
        "--prompt-tokens",
        "4",
        "--prompt-tokens-most",
        "8",
    ),
    *("--new-tokens", str(NEW_EACH), "--ttft-s", "60", "--tpot-s", "60"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATA_DIR", str(made))
        yield made


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What the command printed, by variant."""
    model = ("--model", "bundled:tiny", "--stack", "native_decode:weights=w4:calibration=none")
    meters = ("--meters", "latency,quality", "--quality-tokens", str(QUALITY_TOKENS))
    ran = optigpu(
        dict(os.environ), "ladder", "--workload", "serve", *model, *LOAD, *meters, *QUICK, "--format", "json"
    )
    assert ran.returncode in MEASURED, ran.stderr
    return {result["variant"]["label"]: result for result in json.loads(ran.stdout)["results"]}


def value(result: dict[str, Any], metric: str) -> float:
    found = result["metrics"][metric]
    assert found["value"] is not None, found["reason"]
    return float(found["value"])


@pytest.mark.slow
@pytest.mark.long
def test_both_engines_have_the_load_and_the_quality_of_the_step_that_served(
    results: dict[str, dict[str, Any]],
) -> None:
    assert set(results) == {"baseline", "native_decode"}
    plain, native = results["baseline"], results["native_decode"]
    assert value(plain, "kld_mean") < 1e-9 < value(native, "kld_mean") < 0.1
    assert value(plain, "top1_agreement") == 1.0
    for result in results.values():
        assert value(result, "alone_agreement") == 1.0
        assert value(result, "tokens_per_s") == pytest.approx(NEW_EACH * value(result, "requests_per_s"))
        assert value(result, "goodput_per_s") == pytest.approx(value(result, "requests_per_s"))
        assert 0 < value(result, "ttft_s") < value(result, "latency_s")
        assert result["facts"]["load"]["queries"] == QUERIES
        law = LoadFacts.model_validate(result["facts"]["load"]).law
        assert law is not None
        assert law.holds
    digests = {result["variant"]["workload_digest"] for result in results.values()}
    assert len(digests) == 1


@pytest.mark.long
@pytest.mark.slow
def test_the_run_is_kept_shown_and_drawn(results: dict[str, dict[str, Any]], folder: Path) -> None:
    (kept,) = (folder / "runs").glob("*.json")
    outcomes = json.loads(kept.read_text())["outcomes"]
    for outcome in outcomes:
        (latencies,) = outcome["samples"]["latency_s"]
        assert len(latencies) % QUERIES == 0
        assert latencies
    shown = CliRunner().invoke(app, ["show", "last", "--format", "md"])
    assert shown.exit_code == 0, shown.output
    assert "| native_decode" in shown.stdout
    assert "as alone (%)" in shown.stdout
    picture = folder / "loads.svg"
    drawn = CliRunner().invoke(app, ["chart", "last", "--kind", "loads", "--output", str(picture)])
    assert drawn.exit_code == 0, drawn.output
    assert all(label in picture.read_text() for label in results)
