"""How to measure a stored result's stack again: as Python, and as the JSON of a job."""

import json
from dataclasses import dataclass
from pprint import pformat

from optigpu.job.replay import replay_request
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import Document, SpecError

WIDTH = 96
ARGUMENTS = ("backend", "device", "seed", "measure", "limits")


@dataclass(frozen=True)
class Again:
    """The same request in both forms; or why there is none."""

    request: Document | None = None
    python: str = ""
    json: str = ""
    reason: str = ""


def again(result: Document, spec: Document | None) -> Again:
    """From a result as it was stored, and the request of its job."""
    try:
        written = _without_defaults(replay_request(result, spec, {}))
    except SpecError as error:
        return Again(reason=f"This version cannot measure it again: {error}")
    return Again(written, _python(written), json.dumps(written, indent=2, ensure_ascii=False))


def _without_defaults(request: Document) -> Document:
    """What differs from a job's usual fields, and those that name what is measured. Raises SpecError."""
    spec = JobSpec.model_validate(request)
    kept = spec.model_dump(mode="json", exclude_defaults=True)
    named = spec.model_dump(
        mode="json", include={"workload", "model", "backend", "device", "seed"}, exclude_none=True
    )
    return named | kept | {"workload": request["workload"], "stack": list(request["stack"])}


def _python(request: Document) -> str:
    model = f"    {request['model']!r},\n" if request.get("model") else ""
    stack = (
        _argument("stack", [_technique(each) for each in request["stack"]]) if request.get("stack") else ""
    )
    others = "".join(_argument(name, request[name]) for name in ARGUMENTS if name in request)
    workload = _indented(request["workload"])
    return f"import optigpu\n\nreport = optigpu.run(\n    {workload},\n{model}{stack}{others})\nprint(report)"


def _technique(technique: Document) -> object:
    """By its name alone where it has no parameters."""
    return technique["name"] if len(technique) == 1 else technique


def _argument(name: str, value: object) -> str:
    return f"    {name}={_indented(value, len(name) + 1)},\n"


def _indented(value: object, beside: int = 0) -> str:
    return pformat(value, width=WIDTH - beside, sort_dicts=False).replace("\n", "\n" + " " * (4 + beside))
