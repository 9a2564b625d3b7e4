"""Jobs that are posted to a service: how they are followed, what of them is read where, and how they end otherwise."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from optigpu.client import Client
from optigpu.report.formats import MISSING
from optigpu.vocabulary import Document
from tests.engine.brought_kernels import HONEST
from tests.engine.test_endpoint_quality import Model
from tests.journeys.machine import MEASURED, Machine, Station
from tests.servers.completions import serving as telling_server
from tests.servers.telling import telling
from tests.service.pages import Browser
from tests.service.serving import serving

pytestmark = pytest.mark.slow
MEASURE = {
    "replicates": 1,
    "min_seconds": 0.05,
    "max_seconds": 0.3,
    "meters": ["latency", "memory", "quality"],
    "quality": {"tokens": 32},
}
NOBODY = "http://127.0.0.1:9#nothing"
GENERATE = {"kind": "generate", "prompt_tokens": 8, "new_tokens": 4}


def job(**fields: Any) -> dict[str, Any]:
    """The request of a job on a small trained model."""
    about = {"workload": GENERATE, "model": "bundled:tiny", "measure": MEASURE}
    return {**about, "device": "cpu", "limits": {"wait_for_quiet_s": 0}, **fields}


def value(result: Document, metric: str) -> float:
    found = result["metrics"][metric]
    assert found["value"] is not None, found["reason"]
    number: float = found["value"]
    return number


def test_a_job_is_posted_followed_ranked_and_read_on_pages(station: Station) -> None:
    answer = station.served.client.post(
        "/v1/jobs", json=job(plan="ladder", stack=[{"name": "bf16"}], tags=["first"])
    )
    assert answer.status_code == 202, answer.text
    job_id = answer.json()["id"]
    with Client(station.url) as client:
        events = list(client.events(job_id))
    kinds = [event.kind for event in events]
    assert kinds[0] == kinds[-1] == "state"
    assert kinds.count("variant_finished") == 2
    assert events[-1].data["state"] == "succeeded"
    assert kinds.index("rough") < kinds.index("variant_finished")
    assert [event.sequence for event in events] == sorted(event.sequence for event in events)

    found = station.get(f"/v1/jobs/{job_id}/results")["results"]
    assert [each["variant"]["label"] for each in found] == ["baseline", "bf16"]
    assert all(value(each, "tokens_per_s") > 0 for each in found)
    assert value(found[0], "kld_mean") == pytest.approx(0, abs=1e-6)
    assert value(found[1], "weight_bytes") < value(found[0], "weight_bytes")
    rows = station.rows(model="bundled:tiny")
    assert {label: row["result_id"] for label, row in rows.items()} == {
        each["variant"]["label"]: each["id"] for each in found
    }
    history = station.get(f"/v1/results/{found[0]['id']}/history")
    assert {point["result_id"] for point in history["points"]} <= {found[0]["id"]}

    faster = found[1]["id"]
    with Browser(station.served) as browser:
        page = browser.read(f"/jobs/{job_id}")
        assert f"/results/{faster}" in page
        for column in ("weights (MB)", "top-1 (%)", "KLD (nat)"):
            cells = re.findall(rf'data-label="{re.escape(column)}" class="right">([^<]+)<', page)
            assert len(cells) == 2, column
            assert MISSING not in cells
        assert re.search(r'class="best">[^<]+ the baseline', page)
        assert "bundled:tiny" in browser.read(f"/results/{faster}")
        assert "bundled:tiny" in browser.read("/?include_invalid=true")
        assert "bf16" in browser.read(f"/ladder/{job_id}")


def test_a_job_is_submitted_watched_listed_shown_exported_and_withdrawn(
    on_sqlite: Station, tmp_path: Path
) -> None:
    file = tmp_path / "job.json"
    file.write_text(json.dumps(job(name="by the command", workload=GENERATE | {"new_tokens": 5})))
    job_id = on_sqlite.optigpu("submit", str(file)).strip()
    assert "baseline" in on_sqlite.optigpu("watch", job_id, status=MEASURED)
    listed = {each["id"]: each for each in on_sqlite.read("jobs")["jobs"]}
    assert (listed[job_id]["name"], listed[job_id]["state"]) == ("by the command", "succeeded")
    (result,) = on_sqlite.read("show", job_id)["results"]
    on_sqlite.optigpu("export", job_id, "-o", tmp_path / "job.zip")
    assert (tmp_path / "job.zip").stat().st_size > 0
    on_sqlite.optigpu("chart", job_id, "-o", tmp_path / "job.svg")
    assert result["id"] in json.dumps(on_sqlite.read("leaderboard", "--include-invalid"))
    assert on_sqlite.read("claims")
    advice = on_sqlite.read("advise", "--model", "bundled:tiny", "--prompt-tokens", "8", "--new-tokens", "5")
    assert advice["model"] == "bundled:tiny"
    assert "An exercise." in on_sqlite.optigpu("withdraw", "--job", job_id, "--reason", "An exercise.")
    said = on_sqlite.machine.refused("show", job_id, "--url", on_sqlite.url, status=1)
    assert "was withdrawn" in said


def test_of_a_job_that_fails_half_way_the_other_half_is_kept(on_sqlite: Station) -> None:
    """A server that nobody runs, beside the bundled model, and a type that no CPU multiplies."""
    half = job(
        workload=GENERATE | {"new_tokens": 6},
        beside=[{"backend": "endpoint", "endpoint": NOBODY}],
        name="half",
    )
    ended = on_sqlite.finished(half)
    assert ended.state == "succeeded"
    assert [each.status for each in ended.variants] == ["succeeded", "unsupported"]
    assert "127.0.0.1:9" in str(ended.variants[1].reason)
    assert len(on_sqlite.get(f"/v1/jobs/{ended.id}/results")["results"]) == 1
    with Browser(on_sqlite.served) as browser:
        assert "127.0.0.1:9" in browser.read(f"/jobs/{ended.id}")

    run = on_sqlite.machine.measured("run", *by_flags(half))
    entered = on_sqlite.get(f"/v1/jobs/{on_sqlite.optigpu('import', run['id']).strip()}")
    assert [each["status"] for each in entered["variants"]] == ["succeeded", "unsupported"]
    assert entered["variants"][1]["reason"] == run["outcomes"][1]["reason"]

    none = job(workload={"kind": "matmul", "sizes": [16], "dtypes": ["tf32"]}, model=None)
    lost = on_sqlite.finished(none)
    assert (lost.state, lost.variants[0].status) == ("failed", "unsupported")
    on_sqlite.optigpu("watch", lost.id, status=(1,))


def test_a_server_is_put_under_load_its_quality_bounded_and_both_are_ranked_and_shown(
    on_sqlite: Station,
) -> None:
    model = Model()
    load = {"kind": "serve", "scenario": "closed", "clients": 2, "queries": 4}
    load |= {"prompt_tokens": 8, "new_tokens": 4}
    with telling_server(telling("prompt_logprobs", model.logits, model.write, 20)) as server:
        ended = on_sqlite.finished(job(workload=load, backend="endpoint", endpoint=f"{server.url}#tiny"))
    assert ended.state == "succeeded"
    (result,) = on_sqlite.get(f"/v1/jobs/{ended.id}/results")["results"]
    told = result["facts"]["quality"]["told"]
    assert 0 < told["kld_low"] < told["kld_high"] == value(result, "kld_mean")
    assert value(result, "requests_per_s") > 0
    assert "does not tell which tokens" in result["metrics"]["alone_agreement"]["reason"]
    (row,) = on_sqlite.rows(workload="serve").values()
    assert (row["result_id"], row["backend"]) == (result["id"], "endpoint")
    assert row["kld_mean"] == told["kld_high"]
    with Browser(on_sqlite.served) as browser:
        page = browser.read(f"/results/{result['id']}")
        assert "kld_mean" in page
        assert "goodput" in page
        assert "endpoint" in browser.read("/?include_invalid=true&backend=endpoint")


def by_flags(request: Document) -> tuple[str, ...]:
    """The same request on a command line, with what is measured briefly left to others."""
    shape = request["workload"]
    beside = [word for each in request["beside"] for word in ("--beside", each["endpoint"])]
    tokens = ("--prompt-tokens", str(shape["prompt_tokens"]), "--new-tokens", str(shape["new_tokens"]))
    return ("--model", request["model"], *tokens, *beside, "--name", request["name"])


def test_a_job_that_waits_is_cancelled_and_never_begins(machine: Machine, tmp_path: Path) -> None:
    """A service without a worker."""
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as served:
        waiting = machine.optigpu("submit", "--workload", "matmul", "--device", "cpu", "--url", served.url)
        job_id = waiting.strip()
        assert machine.optigpu("cancel", job_id, "--url", served.url) == "The job is cancelled.\n"
        ended = served.client.get(f"/v1/jobs/{job_id}").json()
        assert (ended["state"], ended["attempts"]) == ("cancelled", [])


def test_a_kernel_is_refused_until_the_operator_allows_it_and_then_measured(
    station: Station, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = {"kind": "kernel", "kernel": HONEST, "implementations": ["reference", "custom"]}
    posted = job(workload=workload, model=None, measure=MEASURE | {"meters": ["latency"]})
    answer = station.served.client.post("/v1/jobs", json=posted)
    assert (answer.status_code, "OPTIGPU_KERNELS=true" in answer.json()["detail"]) == (403, True)
    monkeypatch.setenv("OPTIGPU_KERNELS", "true")
    refused = station.served.client.post("/v1/jobs", json=job(workload=workload | {"kernel": "x = ("}))
    assert refused.status_code == 422
    assert "the file is no Python" in refused.json()["detail"]
    ended = station.finished(posted)
    found = station.get(f"/v1/jobs/{ended.id}/results")["results"]
    assert [each["variant"]["label"].split()[0] for each in found] == ["reference", "custom"]
    judged = found[1]["facts"]["kernel"]
    assert judged["answers"] > 0
    assert judged["error"] < judged["tolerance"]
    monkeypatch.delenv("OPTIGPU_KERNELS")
    file = tmp_path / "kernel.py"
    file.write_text(HONEST)
    run = station.machine.measured(
        "run", "--workload", "kernel", "--kernel", str(file), "--meters", "latency"
    )
    assert run["spec"]["workload"]["kernel"] == HONEST, "the command asks nobody"
