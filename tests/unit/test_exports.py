"""The public list: every name can be had from the package, is known to type checkers, and is documented."""

from importlib import import_module

import pytest

import optigpu
from optigpu.exports import EXPORTS
from tests.pages import ROOT

LIBRARY = ROOT / "docs" / "library.md"


@pytest.mark.parametrize("name", EXPORTS)
def test_each_name_is_what_its_module_defines(name: str) -> None:
    found = getattr(optigpu, name)
    assert found is getattr(import_module(EXPORTS[name]), name)
    assert found.__module__ == EXPORTS[name]


def test_the_package_lists_and_exports_them() -> None:
    assert set(EXPORTS) <= set(dir(optigpu))
    assert set(optigpu.__all__) == {*EXPORTS, "__version__"}


@pytest.mark.parametrize("name", EXPORTS)
def test_each_name_is_documented(name: str) -> None:
    assert f"`{name}`" in LIBRARY.read_text("utf-8")
