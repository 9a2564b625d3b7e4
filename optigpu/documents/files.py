"""JSON documents in files that people name."""

import json
from pathlib import Path

from optigpu.vocabulary import SpecError


def read_json(path: Path) -> object:
    """What the file holds. Raises SpecError, in one sentence, if it cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}.") from error
