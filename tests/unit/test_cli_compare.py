"""`optigpu compare` and what `optigpu replay` refuses: files, labels, ids, and one clear sentence for a mistake."""

import json
from pathlib import Path
from typing import Any

import pytest

from optigpu.vocabulary import new_id
from tests.unit.made_results import ATTRIBUTION, RESULTS
from tests.unit.scripted_service import Answer, Call, scripted_service
from tests.unit.test_cli import Command, optigpu

__all__ = ["optigpu"]  # the fixture

REPORT = {"spec": {"seed": 0}, "results": RESULTS, "attribution": ATTRIBUTION.model_dump(mode="json")}


@pytest.fixture
def report(tmp_path: Path) -> str:
    """A file as `optigpu run --format json` prints it, with three results."""
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    return str(path)


@pytest.fixture
def single(tmp_path: Path) -> str:
    """A file with one result alone, as the service answers it; its name has the sign that labels begin with."""
    path = tmp_path / "result#1.json"
    path.write_text(json.dumps(RESULTS[1]))
    return str(path)


def test_two_results_of_a_file_by_their_labels(optigpu: Command, report: str) -> None:
    ran = optigpu("compare", f"{report}#baseline", f"{report}#int8_weight_only")
    assert (ran.status, ran.err) == (0, "")
    assert "int8_weight_only against baseline: generate preset:gpt2 32+64 x1 on 2x Test CPU" in ran.out
    assert "3.00x [2.94, 3.06]" in ran.out
    assert "different, better" in ran.out
    assert "single_replicate" in ran.out


def test_an_id_is_asked_of_the_service(optigpu: Command, report: str) -> None:
    stored = RESULTS[1] | {"id": new_id()}

    with scripted_service(lambda _: Answer(200, stored)) as (url, calls):
        ran = optigpu(
            "compare", f"{report}#baseline", stored["id"], "--url", url, "--api-key", "k", "--format", "json"
        )
    assert json.loads(ran.out)["candidate"]["id"] == stored["id"]
    assert calls[0].path == f"/v1/results/{stored['id']}"
    assert calls[0].headers["authorization"] == "Bearer k"


def test_what_does_not_compare_needs_anyway(optigpu: Command, report: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    environment = RESULTS[1]["environment"] | {"hardware_class": "1x GPU"}
    other.write_text(json.dumps(RESULTS[1] | {"environment": environment}))
    refused = optigpu("compare", f"{report}#baseline", str(other))
    assert (refused.status, refused.out) == (1, "")
    assert "The hardware differs: 2x Test CPU and 1x GPU." in refused.err
    wanted = optigpu("compare", f"{report}#baseline", str(other), "--anyway")
    assert wanted.status == 0
    assert "The hardware differs" in wanted.out


@pytest.mark.parametrize("command", [("compare", "baseline"), ("replay",)], ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("text", "label", "sentence"),
    [
        (None, "", "is neither the id of a result nor a readable file: No such file"),
        ("{", "", "is not JSON"),
        ("\udcff", "", "is not JSON"),
        ("[]", "", "holds no result"),
        ('{"results": 7}', "", "holds something that is not a result"),
        ('{"results": [{"variant": null}]}', "", "holds something that is not a result"),
        ('{"variant": {"label": "x"}}', "", "holds something that is not a result"),
        ('{"results": []}', "", "holds no result; give a file"),
        (json.dumps(REPORT), "", "holds 3 results; choose one with"),
        (json.dumps(REPORT), "#nothing", "holds 0 results labelled 'nothing'"),
        (json.dumps(REPORT), "#nothing", "#LABEL: baseline, int8_weight_only, int8_weight_only + static"),
    ],
)
def test_a_file_without_the_result_is_one_clear_sentence(
    optigpu: Command, report: str, tmp_path: Path, command: Any, text: str | None, label: str, sentence: str
) -> None:
    path = tmp_path / "given.json"
    if text is not None:
        path.write_bytes(text.encode(errors="surrogateescape"))
    known = [f"{report}#baseline"] if command[0] == "compare" else []
    ran = optigpu(command[0], *known, f"{path}{label}")
    assert (ran.status, ran.out) == (2, "")
    assert sentence in ran.err
    assert ran.err.startswith("Error: ")


def test_a_replay_of_a_technique_that_is_gone_says_so(optigpu: Command, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    variant = RESULTS[0]["variant"] | {"stack": [{"name": "alchemy"}]}
    path.write_text(json.dumps(RESULTS[0] | {"variant": variant}))
    ran = optigpu("replay", str(path))
    assert (ran.status, ran.out) == (2, "")
    assert "the technique alchemy does not exist in this version" in ran.err


def test_a_replay_asks_for_the_result_and_its_job(optigpu: Command) -> None:
    result_id, job_id = new_id(), new_id()
    variant = RESULTS[0]["variant"] | {"stack": [{"name": "alchemy"}]}
    stored = RESULTS[0] | {"id": result_id, "job_id": job_id, "variant": variant}
    job: dict[str, Any] = {
        "id": job_id, "state": "succeeded", "created_at": "2026-01-01T00:00:00Z", "workload": "generate",
        "model": None, "plan": "single", "device": "cpu", "spec": {}, "schema_version": 1,
    }  # fmt: skip

    def answer(call: Call) -> Answer:
        return Answer(200, job if call.path.startswith("/v1/jobs/") else stored)

    with scripted_service(answer) as (url, calls):
        ran = optigpu("replay", result_id, "--url", url)
    assert ran.status == 2
    assert [call.path for call in calls] == [f"/v1/results/{result_id}", f"/v1/jobs/{job_id}"]
