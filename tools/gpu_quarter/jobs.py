"""`python -m tools.gpu_quarter.jobs service|quality FOLDER`: what is done with the job of FOLDER/job.json."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.service import embedded_service
from optigpu.client import Client
from optigpu.documents.fields import read_json
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import JobState

ROUNDING = 1e-5
"""Nats that the order of sums in float32 may cost."""


def service(folder: Path) -> int:
    """Posts it to an embedded service; writes the job, its report and the leaderboard. 1 where it did not succeed."""
    spec = JobSpec.model_validate(read_json(folder / "job.json"))
    with embedded_service(folder / "service.log") as url, Client(url) as client:
        job = client.wait(client.submit(spec).id)
        board = client.leaderboard()
        documents = (job.model_dump(mode="json"), client.report(job.id), board.model_dump(mode="json"))
    for name, document in zip(("posted", "report", "leaderboard"), documents, strict=True):
        (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    return 0 if job.state is JobState.SUCCEEDED else 1


def quality(folder: Path) -> int:
    """What each stack costs, there and on a CPU, once if there is one; 1 where they do not agree, or one is missing."""
    spec: Any = read_json(folder / "job.json")
    there = measured(folder, "device", spec)
    here = there if spec["device"] == "cpu" else measured(folder, "cpu", spec | {"device": "cpu"})
    pairs = {label: (there.get(label), here.get(label)) for label in {**there, **here}}
    lines = [{"stack": label, "agrees": agree(*pair), "device, cpu": pair} for label, pair in pairs.items()]
    (folder / "quality.json").write_text(json.dumps(lines, indent=2) + "\n")
    return 0 if lines and all(line["agrees"] for line in lines) else 1


def measured(folder: Path, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """The divergence of each stack with its interval, by the stack's label."""
    job, found = folder / f"{name}_job.json", folder / f"{name}.json"
    job.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "optigpu", "run", str(job), "--format", "json"]
    found.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    report: Any = read_json(found)
    return {each["variant"]["label"]: each["metrics"]["kld_mean"] for each in report["results"]}


def agree(one: Any, other: Any) -> bool:
    """Whether the 95% intervals of both overlap, or both are below ROUNDING."""
    if not (one and other and one["ci"] and other["ci"]):
        return False
    overlap = max(one["ci"][0], other["ci"][0]) <= min(one["ci"][1], other["ci"][1])
    return bool(overlap or max(one["value"], other["value"]) < ROUNDING)


if __name__ == "__main__":
    sys.exit({"service": service, "quality": quality}[sys.argv[1]](Path(sys.argv[2])))
