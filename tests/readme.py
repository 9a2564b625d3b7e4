"""The README's code, cut out so that tests can run it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language ("" for those of none), in their order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def section(heading: str) -> str:
    """The text below a heading of the second level, up to the next one."""
    return README.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
