"""The examples in the docstrings of what people import run as they stand, and print what they show."""

import doctest
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

from optigpu import facade
from optigpu.exports import EXPORTS
from tests.breadth import spread

pytestmark = pytest.mark.usefixtures("forked_children")

MODULES = [each.name for each in pkgutil.walk_packages(facade.__path__, f"{facade.__name__}.")]


@pytest.mark.slow
@pytest.mark.parametrize("name", spread(MODULES))
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own, where they may write."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    ran = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert ran.attempted or name not in EXPORTS.values(), f"{name} has no example"
    assert not ran.failed
