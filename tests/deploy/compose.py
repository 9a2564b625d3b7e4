"""docker-compose.yml as Docker Compose would read it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
# $$ or ${NAME}, ${NAME:-default}, ${NAME:?message}: what the file uses of Compose's interpolation.
REFERENCE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?::(?P<sign>[-?])(?P<rest>[^}]*))?\})")


def read_compose(variables: Mapping[str, str]) -> dict[str, Any]:
    """The file with `variables`, which .env would hold, filled in.

    Raises ValueError when the file demands a variable that is not given.
    """
    document: dict[str, Any] = interpolate(
        yaml.safe_load((ROOT / "docker-compose.yml").read_text()), variables
    )
    return document


def interpolate(node: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: interpolate(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [interpolate(value, variables) for value in node]
    if isinstance(node, str):
        return REFERENCE.sub(lambda reference: _value(reference, variables), node)
    return node


def _value(reference: re.Match[str], variables: Mapping[str, str]) -> str:
    if reference["name"] is None:
        return "$"
    value = variables.get(reference["name"])
    if value:
        return value
    if reference["sign"] == "?":
        raise ValueError(f"{reference['name']}: {reference['rest']}")
    return reference["rest"] or ""
