"""The counts of tools/code_counts.py, on a made-up tree."""

from dataclasses import replace
from pathlib import Path

import pytest

from tools import code_counts
from tools.code_counts import BOUNDS, Counts, count, exceeds, main, report

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
    monkeypatch.setattr(code_counts, "ROOT", tree)
    monkeypatch.setattr(code_counts, "FOLDERS", ("package",))
    assert main(["--check"]) == 0
    monkeypatch.setattr(code_counts, "BOUNDS", Counts(3, 3, 2, 1))
    assert main(["--check"]) == 1
    assert main([]) == 0


def test_the_bounds_themselves_are_allowed() -> None:
    assert not exceeds(BOUNDS)
    assert exceeds(replace(BOUNDS, any_types=BOUNDS.any_types + 1))


def test_the_report_names_each_count_and_its_bound() -> None:
    lines = report(Counts(1, 2, 3, 4)).splitlines()
    assert [line.split() for line in lines] == [
        ["inner_imports", "1", "(at", "most", "59)"],
        ["any_types", "2", "(at", "most", "349)"],
        ["type_ignores", "3", "(at", "most", "19)"],
        ["cached_classes", "4", "(at", "most", "2)"],
    ]
