"""The record of the decoder's instructions and cache misses."""

import subprocess
from pathlib import Path

from pydantic import BaseModel, ConfigDict

RECORD = Path(__file__).with_name("counts.json")


class Counts(BaseModel):
    """Of one prompt or one step."""

    model_config = ConfigDict(frozen=True)
    instructions: int
    first_cache_misses: int
    last_cache_misses: int


class Record(BaseModel):
    """What was counted, and with which compiler: another one makes other instructions."""

    model_config = ConfigDict(frozen=True)
    compiler: str
    counts: dict[str, Counts]


def compiler() -> str | None:
    """The first line of what g++ says of itself; None where there is none."""
    try:
        done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.splitlines()[0]


def recorded() -> Record:
    return Record.model_validate_json(RECORD.read_bytes())
