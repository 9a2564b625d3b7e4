"""The endpoint backend against real servers that the test starts: what they decode, count and tell."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from optigpu.backends.base import Order
from optigpu.backends.endpoint.client import Completions, Streamed
from optigpu.backends.endpoint.prompts import tokenizer_of
from optigpu.backends.endpoint.runtime import EndpointRuntime, prepared
from optigpu.conductor.session import serving_sessions
from optigpu.hardware import probe
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.vocabulary import DeviceKind, UnsupportedError
from optigpu.workloads.generate import Generate
from optigpu.workloads.serve import Serve
from tests.servers.programs import llama_server, transformers_serve, vllm_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TINY = "bundled:tiny"
PROMPT, NEW, CLIENTS = 24, 32, 4
TEXT = "The history of the"

IN_IDS = "token ids; ignore_eos, min_tokens, return_token_ids"
SERVERS = [
    pytest.param(
        (transformers_serve, "text; generation_config"), id="transformers", marks=pytest.mark.serving
    ),
    pytest.param(
        (llama_server, "token ids; ignore_eos, min_tokens"), id="llama-server", marks=pytest.mark.llama_server
    ),
    pytest.param((vllm_server, IN_IDS), id="vllm", marks=pytest.mark.vllm),
]


class Started:
    """A server and the runtime that asks it."""

    def __init__(self, runtime: EndpointRuntime, endpoint: str, asked_in: str) -> None:
        self.runtime, self.endpoint, self.asked_in = runtime, endpoint, asked_in


@pytest.fixture(scope="module", params=SERVERS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    start, asked_in = request.param
    folder = tmp_path_factory.mktemp("server")
    with start(BUNDLED["tiny"], folder) as endpoint:
        order = Order(TINY, (), Generate(), DeviceKind.CPU, 0, 1, folder, probe(), endpoint)
        runtime = prepared(order, lambda _: None)
        yield Started(runtime, endpoint, asked_in)
        runtime.close()


def prompts(rows: int) -> Any:
    return np.random.default_rng(5).integers(2048, size=(rows, PROMPT))


def test_it_is_asked_in_its_own_way(started: Started) -> None:
    assert started.runtime.notes.facts["server"]["asked_in"] == started.asked_in


@pytest.mark.parametrize("rows", [1, 3])
def test_exactly_as_many_tokens_come_as_were_asked_for(started: Started, rows: int) -> None:
    found = started.runtime.generate(prompts(rows), NEW)
    assert found.tokens.shape == (rows, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) >= 0
    assert found.gaps_s[0] > 0


def test_greedy_text_is_transformers_text(started: Started) -> None:
    import torch

    from optigpu.models.loading.load import load_model

    reference = parse_reference(TINY)
    tokenizer = tokenizer_of(reference)
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT).ids
    model = load_model(reference, device="cpu", dtype="float32")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)  # type: ignore[operator]
    found = asyncio.run(streams(started.runtime, [ids]))[0]
    assert found.error is None
    assert found.text == tokenizer.decode(expected[0, len(ids) :].tolist())
    if found.ids is not None:
        assert list(found.ids) == expected[0, len(ids) :].tolist()


def test_several_clients_are_served_at_once(started: Started) -> None:
    found = asyncio.run(streams(started.runtime, prompts(CLIENTS).tolist()))
    assert [each.error for each in found] == [None] * CLIENTS
    assert {each.tokens for each in found} == {NEW}
    assert {each.prompt_tokens for each in found} == {PROMPT}


@pytest.mark.parametrize("scenario", ["Server", "closed"])
def test_a_load_is_served(started: Started, scenario: str) -> None:
    asked: dict[str, Any] = {"clients": CLIENTS} if scenario == "closed" else {"rates": [8]}
    shapes = {
        "scenario": scenario,
        "queries": 6,
        "prompt_tokens": 8,
        "prompt_tokens_most": 16,
        "new_tokens": 8,
    }
    request = Serve.model_validate(shapes | asked).prepare(started.runtime)
    assert request.check().problem is None
    assert request.run()["tokens_per_s"] > 0
    run = request.loaded()
    assert (run.failed, set(run.output_tokens), run.law.holds) == (0, {8}, True)
    if started.asked_in == IN_IDS:
        assert request.alone_agreement(48).requests == 6
    else:
        with pytest.raises(UnsupportedError, match="does not tell which tokens"):
            request.alone_agreement(48)


async def streams(runtime: EndpointRuntime, rows: list[list[int]]) -> list[Streamed]:
    async with runtime.streams() as completions:
        assert isinstance(completions, Completions)
        return await asyncio.gather(*(completions.stream(row, NEW) for row in rows))


def test_its_processes_are_known(started: Started) -> None:
    assert serving_sessions([started.endpoint])


def test_what_it_counts_of_itself_is_kept(started: Started) -> None:
    started.runtime.observe(prompts(1))
    metrics = started.runtime.notes.facts["server_metrics"]
    assert metrics is None or metrics["running"] == 0
