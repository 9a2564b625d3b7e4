"""What there is so far: summary.json, which a later run goes on from, and summary.md."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optigpu.documents.files import read_json
from optigpu.documents.result import Environment
from tools.gpu_quarter.runner import Record

NAME = "summary.json"


def read(folder: Path) -> dict[str, Record]:
    """The records of an earlier run, by step. Raises SpecError if they cannot be read."""
    found: Any = read_json(folder / NAME)
    return {each["name"]: Record(**{**each, "error": tuple(each["error"])}) for each in found["steps"]}


def write(folder: Path, machine: Environment, records: Iterable[Record]) -> None:
    """Both files, over what was there."""
    steps = [asdict(record) for record in records]
    document = {"environment": machine.model_dump(mode="json"), "steps": steps}
    (folder / NAME).write_text(json.dumps(document, indent=2) + "\n")
    cards = ", ".join(card.name for card in machine.accelerators) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in machine.software.items())
    lines = [
        f"Card: {cards}. Driver: {machine.driver or 'none'}. Commit: {machine.git_revision}. {versions}.",
        "",
    ]
    lines += ["| step | how it ended | exit status | seconds |", "| --- | --- | ---: | ---: |"]
    for each in steps:
        status = "" if each["status"] is None else each["status"]
        lines.append(f"| {each['name']} | {each['ending']} | {status} | {each['seconds']} |")
    for each in steps:
        lines += [
            "",
            f"## {each['name']}",
            "",
            f"    python {each['command']}",
            *(f"    {line}" for line in each["error"]),
        ]
    (folder / "summary.md").write_text("\n".join(lines) + "\n")
