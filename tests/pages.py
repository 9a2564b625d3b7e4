"""The code of the documentation, cut out so that tests can run it."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
START, SERVICE, LIBRARY, ADD = (
    ROOT / "docs" / f"{name}.md" for name in ("start", "service", "library", "add")
)
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
"""The pages for people who use OptiGPU or change it, without decisions and results."""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language ("" for those of none), in their order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def part(page: Path, heading: str) -> str:
    """The text of a page below a heading of the second level, up to the next one."""
    return page.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def commands(page: Path) -> Iterator[str]:
    """The lines of a page's blocks of shell commands, without their comments; a continued line is one."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.sub(r"(^|\s)#.*$", "", line).strip()
            if command:
                yield command
