"""A benchmark's figures as a file, with when and on what they were measured, and what an earlier file holds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optigpu.documents.fields import read_json
from optigpu.hardware import probe
from optigpu.report.formats import console
from optigpu.vocabulary import OptiGPUError, utc_now


def write(path: Path, benchmark: str, figures: dict[str, Any]) -> None:
    """Writes JSON to `path`, over what was there."""
    document = {
        "benchmark": benchmark,
        "at": utc_now().isoformat(),
        "environment": probe().model_dump(mode="json"),
        **figures,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


def say(goals: Sequence[tuple[str, bool]]) -> int:
    """Prints each goal with whether it was reached; the exit status is 0 where all were, else 1."""
    for text, met in goals:
        console().print(f"{'reached' if met else 'NOT reached'}: {text}", markup=False)
    return 0 if all(met for _, met in goals) else 1


def measured_before(path: Path | None, spec: dict[str, Any], parts: str) -> list[Any]:
    """What the file of an earlier hour holds under `parts`, for a benchmark that goes on with it.

    Raises OptiGPUError if it cannot be read, or was about another job.
    """
    if path is None:
        raise OptiGPUError("--resume goes on with the file of --output; name it.")
    found = read_json(path)
    if not isinstance(found, dict) or found.get("spec") != spec or not isinstance(found.get(parts), list):
        raise OptiGPUError(
            f"{path} has nothing of the same job; leave out --resume, or give the same options."
        )
    measured: list[Any] = found[parts]
    return measured
