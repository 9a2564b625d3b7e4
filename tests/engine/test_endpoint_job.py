"""Jobs of a server from the request to the results: beside torch, alone, and with servers that fail."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optigpu.documents.result import Result, VerdictReason
from optigpu.job.spec import JobSpec
from optigpu.measure import Report, run
from optigpu.vocabulary import VariantStatus
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, cache_with
from tests.servers.completions import EVENTS, Asked, Reply, serving, whole

pytestmark = pytest.mark.slow

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


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """torch beside a server that answers, one that breaks off, one that is not there, and one that is not allowed."""
    with serving() as good, serving(closing_later) as bad:
        endpoints = {
            "good": f"{good.url}#tiny",
            "bad": f"{bad.url}#tiny",
            "nobody": "http://127.0.0.1:9#tiny",
            "elsewhere": "http://10.255.0.1:80#tiny",
        }
        beside = [
            {"backend": "endpoint", "endpoint": url, "label": label} for label, url in endpoints.items()
        ]
        yield measured(job(beside=beside), tmp_path_factory.mktemp("locks"))


def of(report: Report, label: str) -> Result:
    return next(result for result in report.results if result.variant.label == label)


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


def test_servers_that_fail_leave_the_others_alone(report: Report) -> None:
    reasons = {row.label: (row.status, str(row.reason)) for row in report.attribution.rows}
    assert reasons["baseline"][0] is VariantStatus.SUCCEEDED
    assert reasons["bad"][0] is VariantStatus.FAILED
    assert "closed the stream" in reasons["bad"][1]
    assert reasons["nobody"][0] is VariantStatus.UNSUPPORTED
    assert "No server answers at http://127.0.0.1:9/v1" in reasons["nobody"][1]
    assert reasons["elsewhere"][0] is VariantStatus.UNSUPPORTED
    assert "set OPTIGPU_ENDPOINT_HOSTS" in reasons["elsewhere"][1]
