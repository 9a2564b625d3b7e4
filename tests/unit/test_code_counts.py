"""The counts of tools/code_counts.py, on a made-up tree."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools import code_counts
from tools.code_counts import BOUNDS, Counts, Sizes, count, exceeds, main, sizes

CODE = '''
"""Any torch in a text counts nothing: # type: ignore"""
import torch
import typing
from functools import cache
from typing import Any

import functools


def outside(x: Any) -> dict[str, typing.Any]:
    return torch.zeros(x)


def importing() -> None:
    import torch.nn.functional as F
    from transformers import AutoModel


def around() -> None:
    def within() -> None:
        from torch import nn

    import torchao
    from .torch import helper


class Holder:
    async def method(self) -> None:
        if True:
            from transformers.utils import logging  # type: ignore[attr-defined]


@cache
def made() -> type:
    class Layer: ...

    return Layer


@functools.lru_cache(maxsize=None)
def made_later(n: int) -> type:
    def inner() -> type:
        class Other: ...

        return Other

    return inner()


@cache
def number() -> int:
    return 1


def uncached() -> type:
    class Third: ...

    return Third
'''


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "package/deep").mkdir(parents=True)
    (tmp_path / "package/deep/code.py").write_text(CODE)
    (tmp_path / "package/other.py").write_text("from typing import Any\n\nx: Any = 1  # type: ignore\n")
    (tmp_path / "package/notes.txt").write_text("x: Any = 1  # type: ignore\n")
    return tmp_path


def test_each_thing_is_counted_once_and_nothing_else(tree: Path) -> None:
    assert count([tree / "package"]) == Counts(inner_imports=3, any_types=3, type_ignores=2, cached_classes=2)


def test_what_is_above_a_bound_fails(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", tree], check=True)
    monkeypatch.setattr(code_counts, "ROOT", tree)
    monkeypatch.setattr(code_counts, "FOLDERS", ("package",))
    assert main(["--check"]) == 0
    for name, bound in (("BOUNDS", Counts(3, 3, 2, 1)), ("LARGEST", Sizes(-1, 0, 0, 0))):
        with monkeypatch.context() as patch:
            patch.setattr(code_counts, name, bound)
            assert main(["--check"]) == 1
            assert main([]) == 0


def test_files_are_those_that_git_holds_and_lines_those_of_python(tree: Path) -> None:
    for name in ("optigpu/a.py", "optigpu/deep/b.py", "optigpu/c.cpp", "tests/test_a.py", "notes.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("one\ntwo\n")
    (tree / "build").mkdir()
    (tree / "build" / "made.py").write_text("1\n")
    expected = Sizes(files=8, optigpu_lines=4, tests_lines=2, benchmarks_lines=0)
    assert sizes(tree) == expected, "without git"
    for command in (["init", "-q"], ["add", "optigpu", "tests", "package", "notes.py"]):
        subprocess.run(["git", *command], cwd=tree, check=True)
    assert sizes(tree) == expected


def test_the_bounds_themselves_are_allowed() -> None:
    assert not exceeds(BOUNDS, BOUNDS)
    assert exceeds(replace(BOUNDS, any_types=BOUNDS.any_types + 1), BOUNDS)
