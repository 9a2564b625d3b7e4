"""Jobs that are posted to a service: how they are followed, what of them is read where, and how they end otherwise. And
a run that somebody measures on their machine, looks at, and enters into a service; and what is not entered."""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from optigpu.client import Client
from optigpu.vocabulary import Document
from tests.journeys.machine import BRIEF, MEASURED, TINY, Machine, Station
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
        assert f"/results/{faster}" in browser.read(f"/jobs/{job_id}")
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


@pytest.fixture(scope="module")
def run(machine: Machine) -> Document:
    """The ladder of a bundled model, as it lies in its file."""
    document: Document = machine.measured("ladder", *TINY, "--stack", "bf16", "--name", "A first look")
    assert [each["status"] for each in document["outcomes"]] == ["succeeded"] * 2
    return document


def test_a_run_is_listed_shown_compared_drawn_and_exported(
    run: Document, machine: Machine, tmp_path: Path
) -> None:
    listed = {each["id"]: each for each in machine.read("runs")}
    assert (listed[run["id"]]["name"], listed[run["id"]]["results"]) == ("A first look", 2)
    shown = machine.read("show", run["id"])
    assert shown["results"] == run["results"]
    figure = run["results"][1]["metrics"]["tokens_per_s"]["value"]
    for form in ("table", "md", "csv", "tex"):
        assert "bf16" in machine.optigpu("show", run["id"][-8:], "--format", form)

    file = machine.folder / "runs" / f"{run['id']}.json"
    compared = machine.read("compare", f"{file}#baseline", f"{file}#bf16")
    assert compared["metrics"]["tokens_per_s"]["candidate"] == figure
    for kind in ("ladder", "roofline"):
        drawn = tmp_path / f"{kind}.svg"
        machine.optigpu("chart", run["id"], "--kind", kind, "-o", drawn)
        assert "bf16" in drawn.read_text("utf-8")
    every = machine.optigpu("charts", run["id"], "--out", tmp_path / "charts").split()
    assert {Path(each).suffix for each in every} == {".svg", ".png", ".json"}

    machine.optigpu("export", run["id"], "-o", tmp_path / "run.zip")
    with ZipFile(tmp_path / "run.zip") as bundle:
        texts = {name: bundle.read(name) for name in bundle.namelist()}
    assert any(json.loads(text) == run["spec"] for name, text in texts.items() if name.endswith(".json"))
    assert any(b"A first look" in text for name, text in texts.items() if name.endswith(".md"))


def test_a_kept_run_is_imported_ranked_replayed_compared_and_withdrawn(
    run: Document, station: Station
) -> None:
    job_id = station.optigpu("import", run["id"]).strip()
    job = station.get(f"/v1/jobs/{job_id}")
    assert (job["state"], job["name"], job["attempts"]) == ("succeeded", "A first look", [])
    assert job["reason"].endswith("outside of this service.")
    assert job["attribution"] == run["attribution"]
    assert [each["label"] for each in job["variants"]] == ["baseline", "bf16"]
    for outcome, result in zip(run["outcomes"], run["results"], strict=True):
        samples = station.get(f"/v1/results/{result['id']}/samples")["samples"]
        assert samples == outcome["samples"]
    assert "is here already" in station.machine.refused("import", run["id"], "--url", station.url, status=1)

    rows = station.rows(model="bundled:tiny")
    assert {label: row["result_id"] for label, row in rows.items()} == {
        result["variant"]["label"]: result["id"] for result in run["results"]
    }
    told = station.optigpu("leaderboard", "--include-invalid", "--model", "bundled:tiny")
    assert "bf16" in told

    baseline, faster = (result["id"] for result in run["results"])
    compared = station.read("compare", baseline, faster)
    assert compared["candidate"]["id"] == faster
    again = station.read("replay", faster, "--wait-for-quiet", "0")
    (result,) = again["results"]
    assert result["variant"]["variant_digest"] == run["results"][1]["variant"]["variant_digest"]
    assert again["comparison"]["baseline"]["id"] == faster

    station.optigpu("withdraw", faster, "--reason", "Another program ran.")
    assert set(station.rows(model="bundled:tiny")) == {"baseline"}
    gone = station.served.client.get(f"/v1/results/{faster}")
    assert gone.status_code == 410
    assert "Another program ran." in gone.json()["detail"]
    station.optigpu("withdraw", "--job", job_id, "--reason", "All of it.")
    assert station.rows(model="bundled:tiny") == {}
    refused = station.machine.refused("import", run["id"], "--url", station.url, status=1)
    assert f"The result {baseline} was withdrawn on" in refused
    assert refused.endswith(" All of it. Its run is not entered again.\n")


def test_a_search_an_ablation_and_a_batch_scaling_are_imported(on_sqlite: Station) -> None:
    """Plans that are not measured whole, and results without a speed."""
    machine = on_sqlite.machine
    tiny = ("--model", "bundled:tiny", "--prompt-tokens", "4", "--new-tokens", "4")
    machine.measured("search", *tiny, "--stack", "bf16", "--meters", "latency")
    machine.measured("ablation", *tiny, "--stack", "bf16", "--meters", "latency")
    machine.optigpu(
        *("batch-scaling", "--limit", "300MB", "--model", "bundled:tiny", "--workload", "generate"),
        *("--tokens", "8", "--stack", "bf16", "--most", "2", "--device", "cpu"),
    )
    newest: list[Any] = machine.read("runs")[:3]
    assert {each["plan"] for each in newest} == {"search", "ablation", "batch_scaling"}
    for each in newest:
        job = on_sqlite.get(f"/v1/jobs/{on_sqlite.optigpu('import', each['id']).strip()}")
        assert job["state"] == "succeeded", job["reason"]
        assert len(on_sqlite.get(f"/v1/jobs/{job['id']}/results")["results"]) == each["results"]


def test_a_run_of_a_folder_of_models_is_imported_where_the_folder_is_not(
    on_sqlite: Station, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A smaller model that a recipe made of the bundled one; the same file under the same name ranks beside it."""
    machine = on_sqlite.machine
    smaller = machine.folder / "models" / "smaller"
    made = machine.optigpu(
        *("recipe", "structured_pruning", "--keep", "0.5", "--steps", "1", "--texts", "1"),
        *("--batch-size", "1", "--length", "8", "--replicates", "0", "--output", smaller),
    )
    assert str(smaller) in made
    run = machine.measured("run", "--model", "path:smaller", "--prompt-tokens", "8", "--new-tokens", "4")
    monkeypatch.setenv("OPTIGPU_MODELS_DIR", str(tmp_path))
    on_sqlite.optigpu("import", run["id"])
    (row,) = on_sqlite.rows(model="path:smaller").values()
    assert row["result_id"] == run["results"][0]["id"]


@pytest.mark.parametrize("folder", ["file", "file/below", "n" * 300, "\udcff"])
def test_a_folder_that_cannot_be_is_one_sentence(
    folder: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last is a byte that is no text, of which there can be a folder: nothing is kept there yet."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / folder))
    if folder == "\udcff":
        assert machine.optigpu("runs").count("\n") == 1
        assert "`optigpu runs` lists" in machine.refused("show", "last", status=2)
        return
    for words in (("runs",), ("show", "last"), ("export", "last", "-o", "a.zip"), ("run", *TINY)):
        said = machine.refused(*words, status=1)
        assert said.startswith("Error: OPTIGPU_DATA_DIR is '"), said
        assert said.endswith("; name a folder.\n")


def test_a_report_that_was_printed_is_replayed_and_read_beside_claims(
    machine: Machine, tmp_path: Path
) -> None:
    printed = machine.optigpu("run", *TINY, *BRIEF, "--seed", "5", "--format", "json", status=MEASURED)
    file = tmp_path / "report.json"
    file.write_text(printed)
    again = machine.read("replay", file, "--replicates", "2", "--max-seconds", "0.2")
    assert again["results"][0]["seed"] == 5
    assert again["spec"]["measure"]["replicates"] == 2
    claims = machine.read("claims", "--results", file)
    assert claims
