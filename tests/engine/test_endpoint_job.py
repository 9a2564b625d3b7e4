"""Jobs of servers, those that answer and those that fail, and the backend against real servers that the test starts."""

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optigpu.backends.base import Order
from optigpu.backends.endpoint.client import Completions
from optigpu.backends.endpoint.prompts import tokenizer_of
from optigpu.backends.endpoint.runtime import EndpointRuntime, prepared
from optigpu.backends.serving import Streamed
from optigpu.documents.result import Result, VerdictReason
from optigpu.engines.environments import environment_of, variables_of
from optigpu.hardware import probe
from optigpu.measure import Report
from optigpu.models.loading.load import load_model
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.quality.divergence import log_likelihood
from optigpu.quality.passages import Passage
from optigpu.quality.told import Bounded, expected_by_logits
from optigpu.vocabulary import DeviceKind, UnsupportedError, VariantStatus
from optigpu.workloads.generate import Generate
from optigpu.workloads.serve import Serve
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, own_folders
from tests.engine.llama_server import started as llama_started
from tests.engine.llama_server import with_tokenizer
from tests.engine.sessions import measured, quick_job
from tests.servers.completions import EVENTS, Asked, Behave, Reply, serving, whole
from tests.servers.process import running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def transformers_serve(model: Path, folder: Path) -> Iterator[str]:
    """`transformers serve`; its model is called by its folder. Gives URL#MODEL."""
    program = Path(sys.executable).with_name("transformers")
    arguments = (
        "serve",
        str(model),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--port",
    )
    with running([str(program), *arguments], "/health", folder, ONE_THREAD) as url:
        yield f"{url}#{model}"


@contextmanager
def vllm_server(model: Path, folder: Path) -> Iterator[str]:
    """vLLM's own server, in its environment. Gives URL#MODEL."""
    environment = environment_of("vllm")
    assert environment is not None
    server = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    server += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256"]
    variables = (
        ONE_THREAD
        | variables_of("vllm")
        | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    )
    server += ["--enforce-eager", "--host", "127.0.0.1", "--port"]
    with running(server, "/health", folder, variables) as url:
        yield f"{url}#tiny"


@contextmanager
def llama_server(model: Path, folder: Path) -> Iterator[str]:
    """llama.cpp's server, with the model in float32 and its tokenizer's words. Gives URL#MODEL."""
    from optigpu.backends.llama_cpp.gguf_tensors import write  # imports gguf and torch
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    plain, whole = folder / "plain.gguf", folder / "whole.gguf"
    write(load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32"), plain, "float32")
    with_tokenizer(plain, whole, model / "tokenizer.json")
    with llama_started(whole, folder, slots=4, length=256, threads=1) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with own_folders(tmp_path_factory.mktemp("endpoint"), BUILDS, OPERATORS, PEAKS):
        yield


async def closing_later(asked: Asked, reply: Reply) -> None:
    """Answers short questions alone."""
    if asked.new_tokens < 10:
        await whole(asked, reply)
        return
    await reply.head(200, EVENTS)
    await reply.token(" a")


def later(behave: Behave) -> Behave:
    """Answers short questions well, such as those that find out what the server takes."""

    async def found(asked: Asked, reply: Reply) -> None:
        await (whole if asked.new_tokens < 10 else behave)(asked, reply)

    return found


async def hanging(asked: Asked, reply: Reply) -> None:
    """Sends a token, and then nothing."""
    await reply.head(200, EVENTS)
    await reply.token(" a")
    await asyncio.sleep(3600)


FAILING: Mapping[str, tuple[Behave, str]] = {
    "closes": (closing_later, "The server closed the stream before the completion's end, with 1 chunk"),
    "hangs": (later(hanging), "The server had not ended its answer after "),
}
"""Servers that begin well, and what a job says of each."""
ABSENT = {"nobody": "http://127.0.0.1:9#tiny", "elsewhere": "http://10.255.0.1:80#tiny"}
LITTLE_TIME = {"wait_for_quiet_s": 0, "timeout_s": 120}
"""A server that hangs is waited for a quarter of what is left of it."""


def beside_all(stack: ExitStack) -> list[dict[str, str]]:
    """A server that answers, those that fail, one that is not there and one that is not allowed."""
    behaviours = {"good": whole} | {label: behave for label, (behave, _) in FAILING.items()}
    urls = {label: f"{stack.enter_context(serving(behave)).url}#tiny" for label, behave in behaviours.items()}
    return [
        {"backend": "endpoint", "endpoint": url, "label": label} for label, url in (urls | ABSENT).items()
    ]


@pytest.fixture(scope="module")
def report(folders: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """torch beside all of them."""
    with ExitStack() as stack:
        spec = quick_job(beside=beside_all(stack), limits=LITTLE_TIME)
        yield measured(spec, tmp_path_factory.mktemp("locks"))


def of(report: Report, label: str) -> Result:
    return next(result for result in report.results if result.variant.label == label)


@pytest.mark.long
def test_a_server_is_measured_beside_an_engine(report: Report) -> None:
    good, torch = of(report, "good"), of(report, "baseline")
    assert good.variant.endpoint is not None
    assert good.variant.endpoint.endswith("/v1#tiny")
    assert torch.variant.endpoint is None
    for metric in ("tokens_per_s", "ttft_s", "tpot_s", "latency_s"):
        value = good.metrics[metric].value
        assert value is not None
        assert value > 0
    assert VerdictReason.OUTPUT_INVALID not in good.verdict.reasons
    assert VerdictReason.CACHED_RESULT not in good.verdict.reasons
    assert good.variant.variant_digest != torch.variant.variant_digest


@pytest.mark.long
def test_what_a_server_does_not_tell_is_null_with_the_reason(report: Report) -> None:
    good = of(report, "good")
    for metric in ("kld_mean", "weight_bytes", "host_peak_bytes", "peak_bytes", "mbu"):
        assert good.metrics[metric].value is None
        assert good.metrics[metric].reason
    assert "returns no log-probabilities" in str(good.metrics["kld_mean"].reason)
    assert good.provenance is not None
    assert good.provenance.weight_hash is None
    assert "server holds the weights" in good.provenance.reasons["weight_hash"]
    assert good.facts.recorded["logits_not_given"]
    assert good.facts.decode_loop == "server"


def ends(report: Report) -> dict[str, tuple[VariantStatus, str]]:
    return {row.label: (row.status, str(row.reason)) for row in report.attribution.rows}


@pytest.mark.long
def test_servers_that_fail_leave_the_others_alone(report: Report) -> None:
    reasons = ends(report)
    assert reasons["baseline"][0] is reasons["good"][0] is VariantStatus.SUCCEEDED
    assert report.stopped is None
    for label, (_, said) in FAILING.items():
        assert reasons[label][0] is VariantStatus.FAILED, label
        assert reasons[label][1].startswith(said)
    assert reasons["nobody"][0] is VariantStatus.UNSUPPORTED
    assert "No server answers at http://127.0.0.1:9/v1" in reasons["nobody"][1]
    assert reasons["elsewhere"][0] is VariantStatus.UNSUPPORTED
    assert "set OPTIGPU_ENDPOINT_HOSTS" in reasons["elsewhere"][1]


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


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_it_is_asked_in_its_own_way(started: Started) -> None:
    assert started.runtime.notes.facts["server"]["asked_in"] == started.asked_in


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("rows", [1, 3])
def test_exactly_as_many_tokens_come_as_were_asked_for(started: Started, rows: int) -> None:
    found = started.runtime.generate(prompts(rows), NEW)
    assert found.tokens.shape == (rows, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) >= 0
    assert found.gaps_s[0] > 0


@pytest.mark.timeout(1800)
def test_greedy_text_is_transformers_text(started: Started) -> None:
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


@pytest.mark.timeout(1800)
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


@pytest.mark.timeout(1800)
def test_log_probabilities_are_those_of_the_model(started: Started) -> None:
    """In fp32, but for a cache of float16, so that both bounds are rounding alone; in a chat it answers instead."""
    if started.asked_in.startswith("text"):
        with pytest.raises(UnsupportedError, match="returns no log-probabilities"):
            started.runtime.telling(None)
        return
    passage = Passage(prompts(1)[0], 4)
    model = load_model(parse_reference(TINY), device="cpu", dtype="float32")
    logits = model(torch.from_numpy(passage.tokens)[None]).logits[0].detach().numpy()
    bounded = Bounded()
    for told in started.runtime.telling(None).told([passage], True):
        row = logits[passage.first - 1 + told.position]
        bounded.add(expected_by_logits(row, told), told)
        assert abs(told.log_likelihood - log_likelihood(row, told.target)) < 2e-3
    assert bounded.low.metrics()["top1_agreement"] == 1
    assert bounded.high.metrics()["kld_mean"] < 1e-3
    assert len(list(started.runtime.telling(None, by_chat=True).told([passage], False))) == passage.positions


async def streams(runtime: EndpointRuntime, rows: list[list[int]]) -> list[Streamed]:
    async with runtime.streams() as completions:
        assert isinstance(completions, Completions)
        return await asyncio.gather(*(completions.stream(row, NEW) for row in rows))
