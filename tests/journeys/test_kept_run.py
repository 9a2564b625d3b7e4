"""Somebody measures on their machine, looks at what was kept, and enters it into a service; and what is not entered."""

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from optigpu.vocabulary import Document
from tests.journeys.machine import BRIEF, MEASURED, TINY, Machine, Station

pytestmark = pytest.mark.slow


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
    spans = machine.read("show", run["id"], "--timeline")
    assert {(span["index"], span["doing"]) for span in spans} >= {(0, "loading"), (1, "measuring")}
    assert min(span["seconds"] for span in spans) >= 0
    loaded = [span for span in spans if span["doing"] == "loading"]
    assert all(span["cpu_s"] > 0 for span in loaded)
    assert "the whole job" in machine.optigpu("show", run["id"], "--timeline")

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
