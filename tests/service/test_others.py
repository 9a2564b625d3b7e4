"""What other tools measured is listed apart and marked, and ranks nowhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.others.formats import read
from tests.engine.processes import optigpu
from tests.service.records import a_metric, a_result
from tests.service.serving import Served

pytestmark = pytest.mark.slow
FILES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "unit" / "files_of_others.json").read_text())


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What GuideLLM wrote."""
    path = tmp_path / "benchmarks.json"
    path.write_text(json.dumps(FILES["GuideLLM"]))
    return path


def posted(service: Served, file: Path) -> Any:
    found = read(file)
    assert found is not None
    return service.client.post("/v1/imports/others", json=found.model_dump(mode="json"))


def page(service: Served, **query: Any) -> dict[str, Any]:
    found: dict[str, Any] = service.client.get("/v1/leaderboard", params=query).json()
    return found


def test_a_file_is_imported_by_the_command_once(service: Served, file: Path) -> None:
    for _ in range(2):
        entered = optigpu({}, "import", str(file), "--url", service.url)
        assert entered.returncode == 0, entered.stderr
        assert "Measured by others: GuideLLM 0.8.1" in entered.stdout
        assert "Left out" in entered.stdout
    assert len(page(service, others=True)["others"]) == 1
    shown = optigpu({}, "leaderboard", "--others", "--url", service.url)
    assert "Measured by others: GuideLLM 0.8.1" in shown.stdout, shown.stderr


def test_it_stands_on_no_board_and_changes_no_rank(service: Served, file: Path) -> None:
    service.submit()
    metric = {"tokens_per_s": a_metric("tokens_per_s", 1.0, (0.9, 1.1))}
    service.finish(service.claim(), a_result(metric, index=0, workload="generate"))
    before = page(service)
    assert before["boards"]
    assert before["others"] == []
    assert posted(service, file).status_code == 201
    assert page(service) == before
    after = page(service, others=True)
    assert [each | {"links": {}} for each in after["boards"]] == [
        each | {"links": {}} for each in before["boards"]
    ]
    (found,) = after["others"]
    assert (found["tool"], found["version"]) == ("GuideLLM", "0.8.1")
    assert not any("rank" in each for each in (found, *found["rows"]))


def test_the_filters_of_model_and_metric_apply(service: Served, file: Path) -> None:
    model = posted(service, file).json()["model"]
    for query, count in (
        ({"model": model[2:].upper()}, 1),
        ({"metric": "ttft_s"}, 1),
        ({"metric": "tflops"}, 0),
    ):
        assert len(page(service, others=True, **query).get("others", [])) == count, query


def test_the_page_shows_it_where_it_is_asked_for(service: Served, file: Path) -> None:
    posted(service, file)
    assert "GuideLLM" not in service.client.get("/").text
    text = service.client.get("/", params={"others": True}).text
    assert "Measured by others: GuideLLM 0.8.1" in text
    assert "not ranked" in text


def test_it_is_removed_by_its_id(service: Served, file: Path) -> None:
    place = f"/v1/imports/others/{posted(service, file).json()['id']}"
    assert page(service, others=True)["others"]
    assert [service.client.delete(place).status_code for _ in range(2)] == [204, 404]
    assert page(service, others=True)["others"] == []


def test_a_figure_of_no_metric_of_ours_is_refused(service: Served, file: Path) -> None:
    document = posted(service, file).json()
    for name in ("id", "imported_at"):
        del document[name]
    document["rows"][0]["figures"][0]["metric"] = "happiness"
    answer = service.client.post("/v1/imports/others", json=document)
    assert answer.status_code == 422
    assert "happiness" in answer.json()["detail"]
