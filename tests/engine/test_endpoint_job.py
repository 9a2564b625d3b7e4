"""Jobs of a server from the request to the results: beside torch, alone, and with servers that fail."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.result import Result, VerdictReason
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.vocabulary import VariantStatus
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, cache_with
from tests.servers.completions import EVENTS, HTML, Asked, Behave, Reply, page, serving, whole

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

QUICK = {"replicates": 1, "min_seconds": 0.01, "max_seconds": 1, "meters": ["latency", "memory", "quality"]}
GENERATE = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 16}


def job(**changes: Any) -> JobSpec:
    document = {"workload": GENERATE, "model": "bundled:tiny", "measure": QUICK}
    document |= {"limits": {"wait_for_quiet_s": 0}}
    return JobSpec.model_validate(document | changes)


def measured(spec: JobSpec, lock_dir: Path) -> Report:
    return run(spec, lambda _: None, lock_dir=lock_dir, threads=1)


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every child inherits the variables."""
    with pytest.MonkeyPatch.context() as patch:
        folder = cache_with(tmp_path_factory.mktemp("endpoint"), BUILDS, OPERATORS, PEAKS)
        patch.setenv("XDG_CACHE_HOME", str(folder.parent))
        patch.setenv("OPTIGPU_DATA_DIR", str(tmp_path_factory.mktemp("data")))
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


async def with_fewer(asked: Asked, reply: Reply) -> None:
    """Says that it is done three tokens early, and counts what it sent."""
    await reply.head(200, EVENTS)
    for number in range(asked.new_tokens - 3):
        await reply.token(" a", "stop" if number == asked.new_tokens - 4 else None)
    await reply.usage(asked.new_tokens - 3, asked.prompt_tokens)


async def with_half(asked: Asked, reply: Reply) -> None:
    """Sends half of the tokens and counts all."""
    await reply.head(200, EVENTS)
    for number in range(asked.new_tokens // 2):
        await reply.token("a", "length" if number == asked.new_tokens // 2 - 1 else None)
    await reply.usage(asked.new_tokens, asked.prompt_tokens)


async def hanging(asked: Asked, reply: Reply) -> None:
    """Sends a token, and then nothing."""
    await reply.head(200, EVENTS)
    await reply.token(" a")
    await asyncio.sleep(3600)


FAILING: Mapping[str, tuple[Behave, str]] = {
    "closes": (closing_later, "The server closed the stream before the completion's end, with 1 chunk"),
    "html": (
        later(page(200, HTML, "<title>Welcome</title>")),
        "The server answered with text/html instead of a stream: '<title>Welcome</title>'",
    ),
    "fewer": (later(with_fewer), "The server decoded 13 tokens instead of the 16 asked for."),
    "lies": (later(with_half), "The server counted 16 tokens in a text of 8 bytes: some were not shown"),
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
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """torch beside all of them."""
    with ExitStack() as stack:
        spec = job(beside=beside_all(stack), limits=LITTLE_TIME)
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
    assert "gives no logits" in str(good.metrics["kld_mean"].reason)
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


@pytest.mark.long
def test_so_it_is_under_load(tmp_path: Path) -> None:
    load = {"kind": "serve", "scenario": "closed", "clients": 2, "queries": 4}
    load |= {"prompt_tokens": 8, "new_tokens": 16}
    measure = QUICK | {"meters": ["latency"]}
    with ExitStack() as stack:
        spec = job(workload=load, beside=beside_all(stack), measure=measure, limits=LITTLE_TIME)
        report = measured(spec, tmp_path)
    reasons = ends(report)
    assert reasons["baseline"][0] is reasons["good"][0] is VariantStatus.SUCCEEDED
    assert report.stopped is None
    for label, (_, said) in FAILING.items():
        assert reasons[label][0] is VariantStatus.FAILED, label
        counted = "" if label == "hangs" else "4 of 4 requests failed: "
        assert reasons[label][1].startswith(f"{counted}{said}")
