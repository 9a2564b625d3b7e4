"""A whole job of serve by the command line: two engines under one load, quality, verdict, chart and kept run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from optigpu.cli import app
from optigpu.documents.load import LoadFacts
from tests.engine.command import optigpu
from tests.engine.test_cli_run import MEASURED, QUICK

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]
QUERIES, NEW, QUALITY_TOKENS = 132, 2, 64
LOAD = (
    *(
        "--scenario",
        "closed",
        "--clients",
        "8",
        "--queries",
        str(QUERIES),
        "--prompt-tokens",
        "4",
        "--prompt-tokens-most",
        "8",
    ),
    *("--new-tokens", str(NEW), "--ttft-s", "60", "--tpot-s", "60"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIGPU_DATA_DIR", str(made))
        yield made


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What the command printed, by variant."""
    model = ("--model", "bundled:tiny", "--stack", "native_decode:calibration=none")
    meters = ("--meters", "latency,quality", "--quality-tokens", str(QUALITY_TOKENS))
    ran = optigpu(
        dict(os.environ), "ladder", "--workload", "serve", *model, *LOAD, *meters, *QUICK, "--format", "json"
    )
    assert ran.returncode in MEASURED, ran.stderr
    return {result["variant"]["label"]: result for result in json.loads(ran.stdout)["results"]}


def value(result: dict[str, Any], metric: str) -> float:
    found = result["metrics"][metric]
    assert found["value"] is not None, found["reason"]
    return float(found["value"])


@pytest.mark.long
def test_both_engines_have_the_load_and_the_quality_of_the_step_that_served(
    results: dict[str, dict[str, Any]],
) -> None:
    assert set(results) == {"baseline", "native_decode"}
    plain, native = results["baseline"], results["native_decode"]
    assert value(plain, "kld_mean") < 1e-9 < value(native, "kld_mean") < 0.1
    assert value(plain, "top1_agreement") == 1.0
    for result in results.values():
        assert value(result, "alone_agreement") == 1.0
        assert value(result, "tokens_per_s") == pytest.approx(NEW * value(result, "requests_per_s"))
        assert value(result, "goodput_per_s") == pytest.approx(value(result, "requests_per_s"))
        assert 0 < value(result, "ttft_s") < value(result, "latency_s")
        assert result["facts"]["load"]["queries"] == QUERIES
        law = LoadFacts.model_validate(result["facts"]["load"]).law
        assert law is not None
        assert law.holds
    digests = {result["variant"]["workload_digest"] for result in results.values()}
    assert len(digests) == 1


def test_what_the_verdict_says_is_about_the_machine_alone(results: dict[str, dict[str, Any]]) -> None:
    wrong = {"output_invalid", "littles_law", "quality_below_gate", "memoized"}
    for result in results.values():
        assert not wrong & set(result["verdict"]["reasons"])
        assert "single_replicate" in result["verdict"]["warnings"]


def test_the_run_is_kept_shown_and_drawn(results: dict[str, dict[str, Any]], folder: Path) -> None:
    (kept,) = (folder / "runs").glob("*.json")
    outcomes = json.loads(kept.read_text())["outcomes"]
    for outcome in outcomes:
        (latencies,) = outcome["samples"]["latency_s"]
        assert len(latencies) % QUERIES == 0
        assert latencies
    shown = CliRunner().invoke(app, ["show", "last", "--format", "md"])
    assert shown.exit_code == 0, shown.output
    assert "| native_decode" in shown.stdout
    assert "as alone (%)" in shown.stdout
    picture = folder / "loads.svg"
    drawn = CliRunner().invoke(app, ["chart", "last", "--kind", "loads", "--output", str(picture)])
    assert drawn.exit_code == 0, drawn.output
    assert all(label in picture.read_text() for label in results)
