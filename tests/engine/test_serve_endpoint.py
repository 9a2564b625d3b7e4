"""serve by servers that the test starts: those that serve well, and those that fail under load."""

import asyncio
import tempfile
from typing import Any

import pytest

from optigpu.backends.endpoint.client import Completions, Server
from optigpu.child.messages import Assignment, Broken, Metered, Ready, Round, RunMeter, RunRound
from optigpu.documents.load import LoadRun
from optigpu.hardware.probe import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import Load, Query
from optigpu.load.served import Streaming
from optigpu.vocabulary import OptiGPUError
from tests.engine.in_process import in_process
from tests.engine.test_endpoint_client import REASONS, hanging
from tests.engine.test_endpoint_job import closing_later
from tests.engine.test_replicate import answer, ask
from tests.servers.completions import EVENTS, HTML, Asked, Behave, Reply, page, serving, whole

PROMPT, NEW = list(range(6)), 5
SHAPES = {"kind": "serve", "queries": 6, "prompt_tokens": 4, "prompt_tokens_most": 12, "new_tokens": 12}
SERVER = {"rates": [2000]}
CLIENTS = {"scenario": "closed", "clients": 3}
HTML_PAGE = page(200, HTML, "<title>Welcome</title>")


def assignment(workload: dict[str, Any], url: str) -> Assignment:
    document = {"workload": SHAPES | workload, "model": "bundled:tiny", "backend": "endpoint"}
    spec = JobSpec.model_validate(document | {"endpoint": f"{url}#tiny"})
    return Assignment(
        variant=variants_of(spec)[0],
        environment=probe(),
        measure=spec.measure,
        seed=0,
        replicate=0,
        folder=tempfile.mkdtemp(),
        threads=1,
    )


def ready(workload: dict[str, Any], behave: Behave) -> Ready:
    """What a measuring process says of such a server."""
    with serving(behave) as server, in_process() as child:
        child.tell(assignment(workload, server.url))
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


@pytest.mark.parametrize("workload", [SERVER, CLIENTS], ids=["Server", "closed"])
def test_a_server_is_checked_timed_and_told(workload: dict[str, Any]) -> None:
    with serving(whole) as server, in_process() as child:
        child.tell(assignment(workload, server.url))
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


@pytest.mark.parametrize("confused", [False, True])
def test_the_tokens_that_a_server_tells_are_compared_with_those_of_each_request_alone(confused: bool) -> None:
    with serving(Telling(confused=confused)) as server, in_process() as child:
        child.tell(assignment(CLIENTS, server.url))
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


@pytest.mark.parametrize("behave", REASONS)
def test_each_request_that_a_server_fails_is_counted_with_its_reason(behave: Behave) -> None:
    """It closes the stream half-way, sends fewer tokens than were asked for, counts them wrong, sends no JSON."""
    found = under_load(behave)
    assert (found.failed, found.met, found.goodput_per_s) == (2, 0, 0.0)
    assert found.error == REASONS[behave]
    assert found.law.holds


def test_html_is_no_answer_under_load_either() -> None:
    assert "text/html instead of a stream" in str(under_load(HTML_PAGE).error)


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


async def counting_another_prompt(asked: Asked, reply: Reply) -> None:
    await reply.head(200, EVENTS)
    for number in range(asked.new_tokens):
        await reply.token(" a", "length" if number == asked.new_tokens - 1 else None)
    await reply.usage(asked.new_tokens, asked.prompt_tokens + 3)


def test_a_prompt_that_the_server_counts_otherwise_is_a_failure() -> None:
    found = under_load(counting_another_prompt)
    assert found.failed == 2
    assert "counted 9 tokens of a prompt of 6: its tokenizer is another one" in str(found.error)


class EverySecond:
    """Closes the stream of every second request of a load half-way."""

    def __init__(self) -> None:
        self._count = 0

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        self._count += asked.new_tokens >= 10
        await (closing_later if self._count % 2 else whole)(asked, reply)


def test_a_server_that_fails_some_requests_has_a_wrong_output() -> None:
    problem = ready(CLIENTS, EverySecond()).problem
    assert problem is not None
    assert problem.startswith("3 of 6 requests failed: The server closed the stream before the completion's")


def test_a_server_that_fails_every_request_ends_the_variant() -> None:
    with serving(closing_later) as server, in_process() as child:
        child.tell(assignment(CLIENTS, server.url))
        found = answer(child)
    assert isinstance(found, Broken), found
    assert found.reason.startswith(
        "6 of 6 requests failed: The server closed the stream before the completion"
    )


def test_a_server_that_no_longer_answers_ends_a_round_with_its_reason() -> None:
    behaves: list[Behave] = [whole]

    async def behave(asked: Asked, reply: Reply) -> None:
        await behaves[-1](asked, reply)

    with serving(behave) as server, in_process() as child:
        child.tell(assignment(CLIENTS, server.url))
        assert isinstance(answer(child), Ready)
        behaves.append(HTML_PAGE)
        found = ask(child, RunRound(seconds=0, min_requests=1))
    assert isinstance(found, Broken), found
    assert found.reason.startswith("6 of 6 requests failed: The server answered with text/html")
