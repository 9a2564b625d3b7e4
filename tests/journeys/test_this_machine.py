"""What the command says of a machine, predicts for it, and makes on it, with no service. And a small device that joins
a service by an invitation, reports what it measured, and stands on the edge leaderboard."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import optigpu
from api.__main__ import main
from optigpu.job import bench
from optigpu.models.reference import BUNDLED
from tests.edge.test_agent_end_to_end import ROOT, agent, finish, simulated_device
from tests.engine.sessions import BRIEF as BRIEFLY
from tests.journeys.machine import MEASURED, Machine, Station

pytestmark = pytest.mark.slow


def test_somebody_new_looks_around(machine: Machine) -> None:
    environment = machine.read("probe")
    assert environment["memory_bytes"] > 0
    techniques = {each["name"]: each for each in machine.read("techniques", "--device", "cpu")}
    assert "bf16" in techniques
    models = {each["model"] for each in machine.read("models")}
    assert {"preset:gpt2", "bundled:tiny"} <= models
    assert {each["name"] for each in machine.read("engines", "list")} >= {"ik_llama_cpp", "vllm"}
    assert "GPT-2" in machine.optigpu("claims")


def test_what_fits_is_predicted_and_a_stack_is_advised(machine: Machine) -> None:
    fitting = machine.read("fit", "--model", "bundled:tiny", "--gpu", "rtx4060")
    assert fitting["most_context"] == 512
    assert max(each["largest_context"] or 0 for each in fitting["stacks"]) == 512
    assert "gpt2" in machine.optigpu("fit", "--model", "preset:gpt2", "--gpu", "rtx4060", "--train")
    advice = machine.read("advise", "--model", "bundled:tiny")
    assert advice["model"] == "bundled:tiny"


def test_a_loss_is_gated_and_its_commit_is_found(machine: Machine, tmp_path: Path) -> None:
    project = tmp_path / "project"

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *who, *words], cwd=project, check=True, capture_output=True)

    project.mkdir()
    git("init", "--quiet")
    for number, speed in enumerate((100, 101, 90, 90)):
        (project / "speed").write_text(f"echo {speed} tokens/s\n")
        git("add", "--all")
        git("commit", "--quiet", "--allow-empty", "--message", f"change {number}")
    asked = ("--command", "sh speed", "--metric", "tokens/s", "--repository", project)
    text = machine.optigpu("gate", "--base", "HEAD~3", *asked, status=(1,))
    assert text.startswith("### Gate: worse. tokens/s 10.0% worse")
    assert "(change 2)" in machine.optigpu("bisect", "--good", "HEAD~3", *asked).splitlines()[0]


def test_a_technique_is_checked_before_it_is_trusted(machine: Machine) -> None:
    checked = machine.read("selftest", "--only", "int8_weight_only", "--device", "cpu")
    assert {result["status"] for each in checked for result in each["results"]} == {"ok"}
    assert "int8_weight_only" in machine.optigpu("techniques", "--device", "cpu")


def test_the_machine_is_measured_for_one_line_to_quote(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes are smaller than those of a person, who has two minutes."""
    monkeypatch.setattr(bench, "brief", lambda _: BRIEFLY)
    small = bench.Sizes((64,), ("float32",), (64,))
    monkeypatch.setattr(bench, "SIZES", dict.fromkeys(bench.SIZES, small))
    found = machine.read(
        *("bench", "--model", "preset:tiny-llama-test", "--precision", "fp32", "--device", "cpu"),
        status=MEASURED,
    )
    assert len(found["runs"]) == 3
    assert "tokens/s" in found["summary"]


def test_a_model_that_the_library_quantized_is_used_and_measured(machine: Machine) -> None:
    model = AutoModelForCausalLM.from_pretrained(BUNDLED["tiny"])
    ids = torch.arange(16)[None]
    with torch.no_grad():
        before = model(ids).logits
    quantized = optigpu.quantize(model)
    with torch.no_grad():
        after = quantized(ids).logits
    assert 0 < (after - before).abs().max() < 1
    run = machine.measured(
        "run", "--model", "bundled:tiny", "--new-tokens", "4", "--stack", "int8_weight_only"
    )
    (result,) = run["results"]
    assert result["metrics"]["top1_agreement"]["value"] > 0.9


@pytest.mark.long
def test_a_network_is_converted_for_a_microcontroller_and_fits_its_board(
    machine: Machine, tmp_path: Path
) -> None:
    from tests.edge.tools import edge_python

    made = tmp_path / "made"
    machine.optigpu(
        *("convert", "--model", "mobilenet_v2", "--alpha", "0.35", "--input", "32", "--classes", "4"),
        *("--allow-random-calibration", "--samples", "8", "--output", made, "--python", edge_python()),
    )
    boards = machine.read("fit", made / "manifest.json", status=(0, 1))
    assert "esp32s3-n16r8" in str(boards)


def test_an_agent_enrols_reports_and_is_listed_with_why_it_does_not_rank(
    on_sqlite: Station, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chip is simulated, which its invitation says and its reports repeat: such figures never rank."""
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", on_sqlite.database_url)
    assert main(["devices", "invite", "--simulator", "--name", "on my desk"]) == 0
    (code,) = re.findall(r"\b[0-9A-Z]{4}(?:-[0-9A-Z]{4}){3}\b", capsys.readouterr().out)
    config = simulated_device(tmp_path / "device", on_sqlite.url, invite=code)
    finish(agent([sys.executable], ROOT, config, runs=2), config)

    (device,) = on_sqlite.get("/v1/devices")["devices"]
    assert (device["name"], device["board"]) == ("on my desk", "esp32s3-n16r8")
    reports = on_sqlite.get(f"/v1/devices/{device['id']}/reports")["reports"]
    assert [each["document"]["sequence"] for each in reports] == [2, 1]
    assert {each["ranked"] for each in reports} == {False}
    assert "on my desk" not in json.dumps(on_sqlite.read("leaderboard", "--edge"))
    every = on_sqlite.read("leaderboard", "--edge", "--include-unranked")
    assert "simulator" in json.dumps(every)
