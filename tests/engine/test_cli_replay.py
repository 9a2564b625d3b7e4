"""`optigpu run --format json` and `optigpu replay`: a result is measured again, and the two are compared."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engine.command import optigpu
from tests.engine.test_cli_run import MEASURED, QUICK, environment

pytestmark = pytest.mark.usefixtures("forked_children")

__all__ = ["environment"]  # the fixture


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The command that measured matrix products of two sizes."""
    variables = os.environ | {"OPTIGPU_DATA_DIR": str(tmp_path_factory.mktemp("measured"))}
    return optigpu(
        variables,
        "run",
        "--workload",
        "matmul",
        "--sizes",
        "16,32",
        *QUICK,
        "--seed",
        "5",
        "--format",
        "json",
    )


@pytest.fixture
def measured(ran: subprocess.CompletedProcess[str], tmp_path: Path) -> Path:
    """A file with the two results."""
    assert ran.returncode in MEASURED, ran.stderr
    path = tmp_path / "report.json"
    path.write_text(ran.stdout)
    return path


@pytest.mark.slow
def test_json_is_all_there_is_on_stdout(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode in MEASURED, ran.stderr
    document = json.loads(ran.stdout)
    assert set(document) == {"spec", "results", "attribution"}
    assert [result["variant"]["label"] for result in document["results"]] == ["float32 16", "float32 32"]
    assert all(result["metrics"]["tflops"]["value"] > 0 for result in document["results"])
    assert "2 variants to measure: float32 16, float32 32" in ran.stderr


def replayed(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """What it prints as JSON."""
    ran = optigpu(environment, "replay", *arguments, "--format", "json")
    assert ran.returncode == 0, ran.stderr
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


@pytest.mark.slow
def test_a_replay_measures_the_same_variant_and_compares(environment: dict[str, str], measured: Path) -> None:
    then = json.loads(measured.read_text())["results"][1]
    document = replayed(environment, f"{measured}#float32 32")
    (now,) = document["results"]
    assert now["id"] != then["id"]
    assert now["seed"] == then["seed"] == 5
    assert now["variant"]["variant_digest"] == then["variant"]["variant_digest"]
    assert document["spec"]["measure"]["max_seconds"] == 0.2
    comparison = document["comparison"]
    assert (comparison["baseline"]["id"], comparison["candidate"]["id"]) == (then["id"], now["id"])
    assert comparison["metrics"]["tflops"]["ratio"] == pytest.approx(
        now["metrics"]["tflops"]["value"] / then["metrics"]["tflops"]["value"]
    )
    assert comparison["notes"] == []


@pytest.mark.slow
def test_a_replay_on_other_software_says_what_differs(environment: dict[str, str], measured: Path) -> None:
    report = json.loads(measured.read_text())
    for result in report["results"]:
        result["environment"]["software"]["torch"] = "1.0"
        result["environment"]["hardware_class"] = "another machine"
    measured.write_text(json.dumps(report))
    document = replayed(environment, f"{measured}#float32 16", "--replicates", "2", "--max-seconds", "0.3")
    assert (
        document["spec"]["measure"]["replicates"]
        == document["results"][0]["metrics"]["tflops"]["replicates"]
        == 2
    )
    comparison = document["comparison"]
    differences = {each["field"]: each["baseline"] for each in comparison["differences"]}
    assert differences["environment.software.torch"] == "1.0"
    assert "another machine" in comparison["notes"][0]


@pytest.mark.slow
def test_a_replay_that_cannot_run_here_ends_with_status_1_and_the_reason(
    environment: dict[str, str], measured: Path
) -> None:
    report = json.loads(measured.read_text())
    report["results"] = report["results"][:1]
    report["results"][0]["variant"]["workload"]["dtypes"] = ["tf32"]
    measured.write_text(json.dumps(report))
    ran = optigpu(environment, "replay", str(measured))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert (
        "not measured again: unsupported: There is no tf32 on cpu: tf32 is a mode of NVIDIA's tensor cores; ask for"
        in ran.stderr
    )
