"""Every public command is part of a story."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ASKED_BY = frozenset({"optigpu", "read", "refused", "measured"})
"""What the stories call the command by; its first word may stand in a tuple."""


def test_each_command_of_the_help_is_in_a_story() -> None:
    helped = subprocess.run(
        [sys.executable, "-m", "optigpu", "--help"],
        capture_output=True, text=True, check=True, env={"COLUMNS": "200", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    commands = set(re.findall(r"^│ ([a-z][a-z-]*) ", helped.stdout, re.MULTILINE))
    assert {"probe", "run", "import", "engines"} <= commands
    assert (
        commands - {word for path in Path(__file__).parent.glob("test_*.py") for word in said_in(path)}
        == set()
    )


def said_in(path: Path) -> Iterator[str]:
    """The words that a file's stories say to the command."""
    for call in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ASKED_BY:
            for word in ast.walk(ast.Tuple(call.args[:1])):
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    yield word.value
