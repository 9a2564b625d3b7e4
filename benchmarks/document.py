"""A benchmark's figures as a file, with when and on what they were measured."""

import json
from pathlib import Path
from typing import Any

from optigpu.hardware import probe
from optigpu.vocabulary import utc_now


def write(path: Path, benchmark: str, figures: dict[str, Any]) -> None:
    """Writes JSON to `path`, over what was there."""
    document = {
        "benchmark": benchmark,
        "at": utc_now().isoformat(),
        "environment": probe().model_dump(mode="json"),
        **figures,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
