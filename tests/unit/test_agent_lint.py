"""The lint of the edge agent: each thing that it refuses, and that it lets through what a board can run."""

from pathlib import Path

import pytest

from tools import agent_lint
from tools.agent_lint import check_text, main

PATH = Path("core/example.py")

LACKING = [
    ("import typing", "no module typing"),
    ("import optigpu", "imports none of ours"),
    ("from esp32_agent.core.stats import *", "star import"),
    ("match x:\n    case 1: pass", "no match statement"),
    ("try: pass\nexcept TimeoutError: pass", "no TimeoutError"),
    ("text.removeprefix('x')", "no .removeprefix()"),
    ("def f(a, /): pass", "positional-only"),
    ("@cache\ndef f(): pass", "no decorator cache"),
    ("[*a, 1]", "does not unpack in a list"),
    ("f'{x:{width}}'", "does not nest format specs"),
    ("('a'\n f'{x}')", "does not join an f-string"),
    ("zip(a, b, strict=True)", "zip() has no strict"),
    ("x.startswith(('a', 'b'))", "takes one string"),
]

FOR_CORE = [
    ("x = 1.5", "integers: 1.5"),
    ("x = a / b", "use //"),
    ("x = 2 ** -1", "instead of **"),
    ("x = float(a)", "integers: float"),
    ("x = round(a)", "integers: round"),
    ("f'{x:.2f}'", "format for floats"),
    ("import time\nx = time.time()", "core does not import time"),
    ("from esp32_agent.port.host.http import HostHttp", "core does not import esp32_agent.port.host.http"),
    ("x = data[::-1]", "no slices with a step"),
    ("def f(n):\n    return f(n - 1)", "f calls itself"),
]

ALLOWED = '''
"""A float such as 1.5 in a text, and {x} / {y}, count nothing."""
import hashlib
import json
from array import array

from esp32_agent import VERSION
from esp32_agent.core.ticks import PERIOD
from esp32_agent.port.base import PortError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


class Thing:
    @property
    def name(self) -> "dict[str, int | None]":
        return {}

    @name.setter
    def name(self, value): ...

    @staticmethod
    def made(*args, key=None, **more) -> bytes:
        first, *rest = args
        print(*rest, sep="")
        return f"\\\\u{key:04x} {rest[0]!r:>8} {more:,}".encode() + b"a" b"b"


def spread(x):
    try:
        while (n := x // 2) > 1:
            x -= n
    except (OSError, ValueError, MemoryError) as error:
        raise PortError("it failed: " + f"{error}" + " at %d%%" % x)
    return array("I", bytearray(8)), data[1:3], x % 5, n.to_bytes(4, "big")
'''


def _messages(text: str, is_core: bool) -> list[str]:
    return [finding.message for finding in check_text(text, PATH, is_core=is_core)]


@pytest.mark.parametrize(("text", "message"), LACKING)
def test_what_micropython_lacks_is_found(text: str, message: str) -> None:
    assert any(message in found for found in _messages(text, is_core=False))


@pytest.mark.parametrize(("text", "message"), FOR_CORE)
def test_what_core_may_not_do_is_found_in_core_alone(text: str, message: str) -> None:
    assert any(message in found for found in _messages(text, is_core=True))
    assert not any(message in found for found in _messages(text, is_core=False))


def test_what_a_board_can_run_passes() -> None:
    assert _messages(ALLOWED, is_core=True) == []


def test_a_finding_names_file_and_line_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("core/sums.py", "port/host/folder.py", "port/clock.py"):
        path = tmp_path / "esp32_agent" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import time\n\nx = 1 / 2\n")
    monkeypatch.setattr(agent_lint, "ROOT", tmp_path)
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("esp32_agent/")[2].partition(" ")[0] for line in lines] == [
        "core/sums.py:1:",
        "core/sums.py:3:",
    ]
