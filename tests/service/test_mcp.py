"""The endpoint for programs that talk, asked over HTTP by the client of the same package."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from optigpu.store import keys, results, standings, workers
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import new_id
from tests.service.records import a_metric, a_result, a_worker
from tests.service.serving import MATMUL, Served, serving

pytestmark = pytest.mark.slow

httpx2 = pytest.importorskip("httpx2")
KEY = "a-first-key-that-is-long-enough"
Asked = Callable[[Any], Awaitable[Any]]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with keys that everybody may read; with two results and a worker."""
    url = f"sqlite:///{tmp_path_factory.mktemp('mcp') / 'optigpu.db'}"
    with serving(url, api_key=KEY, public_read=True) as served:
        with served.database.write() as session:
            workers.register(session, a_worker(software={"torch": "2.13.0"}))
            for index, stack in enumerate([(), ("bf16",)]):
                speed = 100.0 * (1 + index)
                metric = a_metric("tokens_per_s", speed, (0.99 * speed, 1.01 * speed))
                made = a_result({"tokens_per_s": metric}, index=index, stack=stack, replicates=3)
                results.add(session, made, {})
                standings.enter(session, made)
        yield served


def asked(service: Served, question: Asked, key: str | None = None, mode: str = "auto") -> Any:
    """What the client makes of a question, asked with this key."""

    async def ask() -> Any:
        from mcp.client import Client
        from mcp.client.streamable_http import streamable_http_client

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=30))
            transport = streamable_http_client(f"{service.url}/mcp", http_client=http)
            client = await stack.enter_async_context(Client(transport, mode=mode))
            return await question(client)

    return asyncio.run(ask())


def tool(service: Served, name: str, key: str | None = None, **arguments: Any) -> tuple[bool, Any]:
    """Whether a tool refused, and what it answered."""
    answer = asked(service, lambda client: client.call_tool(name, arguments), key)
    if answer.is_error:
        return True, answer.content[0].text
    return False, answer.structured_content


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_finds_the_tools_and_what_each_changes(public: Served, mode: str) -> None:
    """By both of the protocol's handshakes."""
    found = asked(public, lambda client: client.list_tools(), mode=mode).tools
    changing = [each.name for each in found if not each.annotations.read_only_hint]
    assert {each.name for each in found} == {
        *("list_techniques", "leaderboard", "compare", "advise"),
        *("get_job", "follow_job", "preview_job", "submit_job"),
    }
    assert changing == ["submit_job"]
    assert all(each.description for each in found)


def test_it_reads_without_a_key_what_the_api_reads(public: Served) -> None:
    _, techniques = tool(public, "list_techniques")
    assert {each["name"] for each in techniques["techniques"]} == set(TECHNIQUES)
    _, page = tool(public, "leaderboard", model="preset:gpt2")
    assert page == public.client.get("/v1/leaderboard?model=preset:gpt2").json() | {"boards": page["boards"]}
    first, second = page["boards"][0]["rows"]
    assert (first["label"], first["rank"], first["value"]["ci"]) == ("bf16", 1, [198.0, 202.0])
    pair = {"baseline": second["result_id"], "candidate": first["result_id"]}
    _, compared = tool(public, "compare", **pair)
    assert compared == public.client.get("/v1/compare", params=pair).json()
    assert compared["metrics"]["tokens_per_s"]["decision"] == "better"


def test_without_a_key_it_changes_nothing_and_a_key_needs_the_scope(public: Served) -> None:
    before = public.count_jobs()
    with public.database.write() as session:
        reading = keys.create(session, "reads", ["read"])
    for key in (None, reading):
        refused, words = tool(public, "submit_job", key, job=MATMUL)
        assert (refused, "scope submit" in words) == (True, True)
    assert public.count_jobs() == before
    answer = httpx.post(f"{public.url}/mcp", json={}, headers={"Authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_job_is_looked_at_posted_and_followed_to_its_end(public: Served) -> None:
    refused, preview = tool(public, "preview_job", job=MATMUL)
    assert not refused
    assert [each["label"] for each in preview["variants"]] == ["baseline"]
    refused, job = tool(public, "submit_job", KEY, job=MATMUL)
    assert (refused, job["state"]) == (False, "queued")
    _, waiting = tool(public, "follow_job", id=job["id"], wait_s=0.05)
    assert waiting["state"] == "queued"
    public.finish(public.claim(), a_result({"tflops": a_metric("tflops", 1.0)}, workload="matmul"))
    _, ended = tool(public, "follow_job", id=job["id"], wait_s=20)
    assert (ended["state"], ended["variants"][0]["status"]) == ("succeeded", "succeeded")
    _, same = tool(public, "get_job", id=job["id"])
    assert same == ended
    changes = public.client.get("/v1/audit", headers={"Authorization": f"Bearer {KEY}"}).json()["changes"]
    assert job["id"] in {each["target"] for each in changes if each["action"] == "job.submitted"}


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("preview_job", {"job": {"workload": {"kind": "nothing"}}}, "workload.kind: Unknown name 'nothing'"),
        ("leaderboard", {"technique": "bf61"}, "Did you mean bf16?"),
        ("get_job", {"id": new_id()}, "There is no job"),
        ("advise", {"model": "preset:nope"}, "Unknown preset 'nope'"),
    ],
)
def test_what_is_wrong_is_said_in_the_words_of_the_api(
    public: Served, name: str, arguments: dict[str, Any], words: str
) -> None:
    refused, text = tool(public, name, **arguments)
    assert refused
    assert words in text


def test_it_advises_what_was_measured_and_else_what_to_post(public: Served) -> None:
    _, advice = tool(public, "advise", model="preset:opt-125m")
    assert advice["basis"] == "none"
    assert not tool(public, "preview_job", job=advice["job"])[0], "the job can be posted"
