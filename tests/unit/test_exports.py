"""The public list: every name can be had from the package, is known to type checkers, and is documented."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import optigpu
from optigpu.exports import EXPORTS
from tests.pages import ROOT

LIBRARY = ROOT / "docs" / "library.md"


def test_the_table_is_sorted() -> None:
    assert list(EXPORTS) == sorted(EXPORTS)


@pytest.mark.parametrize("name", EXPORTS)
def test_each_name_is_what_its_module_defines(name: str) -> None:
    found = getattr(optigpu, name)
    assert found is getattr(import_module(EXPORTS[name]), name)
    assert found.__module__ == EXPORTS[name]


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(str(optigpu.__file__)).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    typed = {
        alias.name: node.module
        for node in imports
        if node.module and node.module.startswith("optigpu.facade")
        for alias in node.names
    }
    assert typed == EXPORTS


def test_the_package_lists_and_exports_them() -> None:
    assert set(EXPORTS) <= set(dir(optigpu))
    assert set(optigpu.__all__) == {*EXPORTS, "__version__"}


def test_an_unknown_name_says_where_the_known_ones_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'BenchmarkMotor'; dir\(optigpu\) lists"):
        optigpu.__getattr__("BenchmarkMotor")


@pytest.mark.parametrize("name", EXPORTS)
def test_each_name_is_documented(name: str) -> None:
    assert f"`{name}`" in LIBRARY.read_text("utf-8")
