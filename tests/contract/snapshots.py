"""The JSON schemas of a job and of a result, as files: `python -m tests.contract.snapshots` writes them.

Only what a program sees of them: names, types, bounds and defaults, without the texts for people.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from optigpu.documents.result import Result
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import SCHEMA_VERSION

FOLDER = Path(__file__).with_name("schemas")
DOCUMENTS: Mapping[str, type[BaseModel]] = MappingProxyType({"job_spec": JobSpec, "result": Result})
FOR_PEOPLE = {"description", "title", "examples"}
COMMAND = "python -m tests.contract.snapshots"


def snapshot(model: type[BaseModel]) -> str:
    """The text of a model's file."""
    schema = {"schema_version": SCHEMA_VERSION, "schema": _for_programs(model.model_json_schema())}
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def path_of(name: str) -> Path:
    """The file of a document."""
    return FOLDER / f"{name}.json"


def _for_programs(node: Any, *, names: bool = False) -> Any:
    """A schema without texts; where the keys are names of fields (`names`), all of them stay."""
    if isinstance(node, list):
        return [_for_programs(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _for_programs(value, names=key in ("properties", "$defs") and not names)
        for key, value in node.items()
        if names or key not in FOR_PEOPLE
    }


def main() -> None:
    """Writes every file anew."""
    for name, model in DOCUMENTS.items():
        path_of(name).write_text(snapshot(model), encoding="utf-8")


if __name__ == "__main__":
    main()
