"""Each line of the threat model names tests, and each test that it names is there."""

import re

import pytest

from tests.pages import ROOT

PAGE = ROOT / "docs" / "threat-model.md"
LINES = [
    line.split(" | ")
    for line in re.findall(r"^\| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    if line.count(" | ") == 2 and not line.startswith(("could try", "---"))
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_a_line_is_shown_by_tests_that_are_there(line: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", line[2])
    assert named
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
