"""TensorFlow Lite's operators, from operators.toml: their numbers, and what runs them on a device."""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files

from pydantic import Field

from optigpu.vocabulary import Frozen

CUSTOM = 32
"""The number of every operator that has a name of its own instead."""


class Runs(Frozen):
    """The operators for which an engine has kernels, and where that is said."""

    source: str
    operators: frozenset[str]


class Operators(Frozen):
    """`codes` are the schema's numbers of the operators."""

    tflite_micro: Runs
    esp_nn: Runs
    codes: dict[str, int] = Field(min_length=1)


@lru_cache(maxsize=1)
def operators() -> Operators:
    """What the file says."""
    text = files("optigpu.edge").joinpath("operators.toml").read_text(encoding="utf-8")
    return Operators.model_validate(tomllib.loads(text))


def name_of(code: int) -> str:
    """The operator's name; `BUILTIN_999` for a number that is newer than the list."""
    return _names().get(code, f"BUILTIN_{code}")


@lru_cache(maxsize=1)
def _names() -> Mapping[int, str]:
    return {code: name for name, code in operators().codes.items()}
