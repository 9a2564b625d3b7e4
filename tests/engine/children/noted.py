"""Measures as it should, and notes in the file that its argument names what it was told before its first round."""

import sys
from pathlib import Path

from tests.engine.children import talk

NOTES = Path(sys.argv[1])


def note(kind: str) -> None:
    """A line, in one write."""
    with NOTES.open("a") as notes:
        notes.write(kind + "\n")


begin = talk.hear(raw=True)
note(begin["kind"])
talk.say("started")
note(talk.hear()["kind"])
talk.obey(tokens_per_s=10.0)
