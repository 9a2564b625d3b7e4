"""Comparing results over HTTP, and by the command line against a real service."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.client import Client
from optigpu.documents.result import MetricSummary, Result
from optigpu.documents.views import Comparison, Decision
from optigpu.store.tables import ResultRow
from optigpu.vocabulary import ServiceError, new_id
from tests.service.records import a_metric, a_result
from tests.service.serving import Served


def measured(name: str, medians: Sequence[float]) -> dict[str, MetricSummary]:
    """A metric of several processes."""
    value = float(np.mean(medians))
    changes = {"per_replicate": tuple(medians), "replicates": len(medians)}
    return {name: a_metric(name, value).model_copy(update=changes)}


SLOW = a_result(measured("tokens_per_s", (100.0, 101.0, 99.0)), index=0)
FAST = a_result(measured("tokens_per_s", (200.0, 201.0, 199.0)), index=1, stack=("bf16",))
ELSEWHERE = a_result(measured("tokens_per_s", (900.0, 901.0)), index=2, hardware="1x Other GPU")
OTHER = a_result(measured("tokens_per_s", (50.0, 51.0)), index=3, size=2)


@pytest.fixture
def compared(service: Served) -> Served:
    """A service that holds the four results."""
    service.submit()
    service.finish(service.claim(), SLOW, FAST, ELSEWHERE, OTHER)
    return service


def get(service: Served, baseline: Result, candidate: Result, **query: Any) -> Any:
    """What the call answers."""
    ids = {"baseline": baseline.id, "candidate": candidate.id}
    return service.client.get("/v1/compare", params=ids | query)


def test_a_faster_variant_is_better_and_the_other_way_round_worse(compared: Served) -> None:
    answer = get(compared, SLOW, FAST)
    assert answer.status_code == 200, answer.text
    found = Comparison.model_validate_json(answer.content)
    speed = found.metrics["tokens_per_s"]
    assert speed.ratio == pytest.approx(2)
    assert speed.ci is not None
    assert speed.ci[0] < 2 < speed.ci[1]
    assert speed.decision is Decision.BETTER
    assert (found.baseline.id, found.candidate.label) == (SLOW.id, "bf16")
    assert get(compared, FAST, SLOW).json()["metrics"]["tokens_per_s"]["decision"] == "worse"


def test_the_same_result_twice_is_equivalent_if_its_processes_agree(compared: Served) -> None:
    speed = get(compared, SLOW, SLOW).json()["metrics"]["tokens_per_s"]
    assert (speed["ratio"], speed["decision"]) == (1.0, "equivalent")


def test_what_version_1_stored_is_shown_as_it_was_and_compared(compared: Served) -> None:
    quality = {"quality": {"text": "self", "tokens_sha256": "a" * 64}}
    older = {"schema_version": 1, "details": {"decode_loop": "transformers generate"} | quality}
    with compared.database.write() as session:
        row = session.get_one(ResultRow, SLOW.id)
        row.document = {name: value for name, value in row.document.items() if name != "facts"} | older
    shown = compared.client.get(f"/v1/results/{SLOW.id}").json()
    assert (shown["schema_version"], shown["details"]) == (1, older["details"])
    answer = get(compared, SLOW, FAST)
    assert answer.status_code == 200, answer.text
    assert answer.json()["metrics"]["tokens_per_s"]["decision"] == "better"


@pytest.mark.parametrize(("other", "word"), [(ELSEWHERE, "hardware"), (OTHER, "workloads")])
def test_what_does_not_compare_is_a_conflict_unless_it_is_wanted(
    compared: Served, other: Result, word: str
) -> None:
    refused = get(compared, SLOW, other)
    assert refused.status_code == 409
    assert refused.headers["content-type"] == "application/problem+json"
    assert word in refused.json()["detail"]
    wanted = get(compared, SLOW, other, anyway=True)
    assert wanted.status_code == 200
    assert word in wanted.json()["notes"][0]


def test_an_unknown_result_is_not_found(compared: Served) -> None:
    for ids in ((SLOW.id, new_id()), (new_id(), SLOW.id)):
        answer = compared.client.get(
            "/v1/compare", params=dict(zip(("baseline", "candidate"), ids, strict=True))
        )
        assert answer.status_code == 404
        assert answer.headers["content-type"] == "application/problem+json"


def test_the_client_compares(compared: Served) -> None:
    with Client(compared.url) as client:
        assert client.compare(SLOW.id, FAST.id).metrics["tokens_per_s"].decision is Decision.BETTER
        with pytest.raises(ServiceError, match="hardware differs") as refused:
            client.compare(SLOW.id, ELSEWHERE.id)
        assert client.compare(SLOW.id, ELSEWHERE.id, anyway=True).notes
    assert refused.value.status == 409


def optigpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "optigpu", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_command_compares_what_the_service_and_a_file_hold(compared: Served, tmp_path: Path) -> None:
    file = tmp_path / "fast.json"
    file.write_text(json.dumps({"spec": {}, "results": [FAST.model_dump(mode="json")], "attribution": None}))
    by_id = optigpu("compare", SLOW.id, FAST.id, "--url", compared.url, "--format", "json")
    by_file = optigpu("compare", SLOW.id, str(file), "--url", compared.url, "--format", "json")
    assert by_id.returncode == by_file.returncode == 0, by_id.stderr + by_file.stderr
    assert json.loads(by_id.stdout)["metrics"] == json.loads(by_file.stdout)["metrics"]
    over_http = get(compared, SLOW, FAST).json()
    assert json.loads(by_id.stdout) == over_http


def test_samples_are_streamed_as_they_were_stored(service: Served) -> None:
    """More than one piece, replicates of different lengths, one of them empty."""
    rng = np.random.default_rng(3)
    raw = {
        "tflops": (tuple(rng.random(10_000).tolist()), (), tuple(rng.random(4096).tolist())),
        "latency_s": ((0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308),),
    }
    service.submit()
    service.finish(service.claim(), SLOW, samples=raw)
    answer = service.client.get(f"/v1/results/{SLOW.id}/samples")
    assert answer.headers["content-type"] == "application/json"
    expected = {name: [list(each) for each in replicates] for name, replicates in raw.items()}
    assert answer.json() == {"result_id": SLOW.id, "samples": expected}
    with Client(service.url) as client:
        assert client.samples(SLOW.id).samples == raw


def test_a_result_without_samples_has_an_empty_list_of_them(service: Served) -> None:
    service.submit()
    service.finish(service.claim(), SLOW)
    assert service.client.get(f"/v1/results/{SLOW.id}/samples").json() == {
        "result_id": SLOW.id,
        "samples": {},
    }
