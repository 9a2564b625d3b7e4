"""`python -m tools.gpu_quarter.quality FOLDER`: what each stack of FOLDER/job.json costs, there and on a CPU.

A stack agrees where the 95% intervals of its divergence from float32 overlap, or both are below ROUNDING. Exit status
1: one does not agree, or was measured on one side alone.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from optigpu.documents.files import read_json

ROUNDING = 1e-5
"""Nats that the order of sums in float32 may cost."""


def main(folder: Path) -> int:
    """Writes device.json, cpu.json and quality.json, and prints a line for each stack."""
    device = measured(folder, "device", {})
    cpu = measured(folder, "cpu", {"device": "cpu"})
    lines = [
        {"stack": label, "device": device.get(label), "cpu": cpu.get(label)} for label in {**device, **cpu}
    ]
    for line in lines:
        line["agrees"] = agree(line["device"], line["cpu"])
        print(line)
    (folder / "quality.json").write_text(json.dumps(lines, indent=2) + "\n")
    return 0 if lines and all(line["agrees"] for line in lines) else 1


def measured(folder: Path, name: str, change: dict[str, str]) -> dict[str, Any]:
    """The divergence of each stack with its interval, by the stack's label."""
    spec: Any = read_json(folder / "job.json")
    job = folder / f"{name}_job.json"
    job.write_text(json.dumps(spec | change))
    command = [sys.executable, "-m", "optigpu", "run", str(job), "--format", "json"]
    with (folder / f"{name}.json").open("wb") as output:
        subprocess.run(command, stdout=output, check=False)
    report: Any = read_json(folder / f"{name}.json")
    return {each["variant"]["label"]: each["metrics"]["kld_mean"] for each in report["results"]}


def agree(one: Any, other: Any) -> bool:
    """Whether both were measured and differ by no more than their intervals or the rounding."""
    if not (one and other and one["ci"] and other["ci"]):
        return False
    overlap = max(one["ci"][0], other["ci"][0]) <= min(one["ci"][1], other["ci"][1])
    return overlap or max(one["value"], other["value"]) < ROUNDING


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
