"""Our compose files as Docker Compose would read them."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
ONE_HOST, WORKERS = "docker-compose.yml", "docker-compose.worker.yml"
# $$ or ${NAME}, ${NAME:-default}, ${NAME:?message}, ${NAME:+other}: what the files use of Compose's interpolation.
REFERENCE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?::(?P<sign>[-?+])(?P<rest>[^}]*))?\})")
ENV_FILE = ".env"


def read_compose(variables: Mapping[str, str], file: str = ONE_HOST) -> dict[str, Any]:
    """A file of the checkout with `variables`, which .env would hold, filled in.

    Raises ValueError when the file demands a variable that is not given.
    """
    return parse_compose((ROOT / file).read_text(), variables)


def parse_compose(text: str, variables: Mapping[str, str]) -> dict[str, Any]:
    """The same for the text of a file. A service with `env_file` gets all variables, below its own environment."""
    document: dict[str, Any] = interpolate(yaml.safe_load(text), variables)
    for definition in document["services"].values():
        if "env_file" in definition:
            assert definition["env_file"] == ENV_FILE
            definition["environment"] = {**variables, **definition.get("environment", {})}
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
    if reference["sign"] == "+":
        return reference["rest"] if value else ""
    if value:
        return value
    if reference["sign"] == "?":
        raise ValueError(f"{reference['name']}: {reference['rest']}")
    return reference["rest"] or ""
