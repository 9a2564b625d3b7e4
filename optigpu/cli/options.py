"""A job from flags or from a file."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flagged import FlagValue, Given
from optigpu.documents.endpoints import ENDPOINT
from optigpu.documents.files import read_json
from optigpu.vocabulary import DeviceKind, Document, SpecError

if TYPE_CHECKING:
    from optigpu.job.spec import JobSpec


SpecFile = Annotated[
    Path | None, typer.Argument(metavar="SPEC.JSON", help="A job as JSON, instead of the flags.")
]


def spec_of(
    given: Given, device: Callable[[], DeviceKind], spec_file: Path | None = None, plan: str | None = None
) -> "JobSpec":
    """The job that the flags or the file describe. `device()` is called only if neither names a device. Raises
    SpecError that says which field is wrong."""
    document = _from_file(spec_file, given) if spec_file else _from_flags(given)
    if "device" not in document:
        document["device"] = device()
    if plan:
        document["plan"] = plan
    return validated(document, strict=spec_file is not None)


def validated(document: Document, *, strict: bool = False) -> "JobSpec":
    """The document as a JobSpec; a `strict` one is read as a service reads it, in which "3" is not a number. Raises
    SpecError with a line for each invalid field."""
    from optigpu.job.spec import JobSpec

    if strict:
        return JobSpec.model_validate_json(json.dumps(document), strict=True)
    return JobSpec.model_validate(document)


def _from_file(path: Path, given: Given) -> dict[str, object]:
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise SpecError(f"Give {path} or flags, not both: put {flags} into the file.")
    document = read_json(path)
    if not isinstance(document, dict):
        raise SpecError(f"{path} must hold one JSON object, a job.")
    return document


def _from_flags(given: Given) -> dict[str, object]:
    from optigpu.cli.flags import (
        DEFAULT_WORKLOAD,
        job_flags,
        read_flags,
        section_flags,
        sections,
        workload_flags,
    )
    from optigpu.workloads import WORKLOADS

    kind = str(given.get("workload", DEFAULT_WORKLOAD))
    workload = WORKLOADS.get(kind)
    named = "model" in given or "models" in given
    model = {"model": workload.example_model} if workload and workload.task.needs_model and not named else {}
    return {
        **model,
        **read_flags(job_flags(), given),
        "workload": {"kind": kind} | read_flags(workload_flags(), given),
        "stack": parse_stack(str(given.get("stack", ""))),
        "beside": parse_beside(given.get("beside", [])),
        **{section: read_flags(section_flags(section), given) for section in sections()},
    }


def parse_beside(given: FlagValue) -> list[dict[str, object]]:
    """`llama_cpp/gguf:type=Q8_0 as eight bits` as the JSON of a stack beside the job's own; each may be left out. The
    same of a server: `http://HOST:PORT#MODEL as server`. Raises SpecError as `parse_stack` does."""
    return [_beside(text) for text in (given if isinstance(given, list) else [str(given)])]


def _beside(text: str) -> dict[str, object]:
    stack, _, label = text.partition(" as ")
    named = {"label": label.strip()} if label.strip() else {}
    if stack.startswith(("http://", "https://")):
        return {"backend": ENDPOINT, "endpoint": stack.strip(), **named}
    backend, slash, rest = stack.partition("/")
    if not slash or re.search("[:,]", backend):  # the slash is within a parameter: draft=path:models/tiny
        backend, rest = "", stack
    own = {"backend": backend.strip()} if backend.strip() else {}
    return {"stack": parse_stack(rest), **own, **named}


def parse_stack(text: str) -> list[dict[str, str]]:
    """`bf16,torch_compile:mode=max-autotune` as the JSON of a stack. Raises SpecError for a parameter without a value;
    the names are checked with the rest of the job."""
    from optigpu.cli.flags import split

    return [_technique(item) for item in split(text)]


def _technique(item: str) -> dict[str, str]:
    name, colon, rest = item.partition(":")
    parameters = re.split(r":(?=\w+=)", rest) if colon else []  # a value may hold a colon: draft=bundled:tiny
    pairs = [parameter.partition("=") for parameter in parameters]
    if bare := [key for key, equals, _ in pairs if not equals]:
        raise SpecError(f"{name}: write the parameter as {name}:{bare[0] or 'PARAMETER'}=VALUE.")
    return {"name": name} | {key: value for key, _, value in pairs}
