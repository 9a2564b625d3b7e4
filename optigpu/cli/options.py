"""A job from flags or from a file."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flagged import FlagValue, Given
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
    """The job that the flags or the file describe. `device()` is called only if neither names a device.

    Raises SpecError that says which field is wrong.
    """
    document = _from_file(spec_file, given) if spec_file else _from_flags(given)
    if not document.get("device"):
        document["device"] = device()
    if plan:
        document["plan"] = plan
    return validated(document)


def validated(document: Document) -> "JobSpec":
    """The document as a JobSpec. Raises SpecError with a line for each invalid field."""
    from pydantic import ValidationError

    from optigpu.job.spec import JobSpec

    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        problems = (_problem(each["loc"], each["msg"]) for each in error.errors(include_url=False))
        raise SpecError("\n".join(problems)) from error


def _problem(place: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {text}" if place else text


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
    _known(kind, list(WORKLOADS), "workload")
    model = {"model": WORKLOADS[kind].example_model} if WORKLOADS[kind].task.needs_model else {}
    return {
        **model,
        **read_flags(job_flags(), given),
        "workload": {"kind": kind} | read_flags(workload_flags(), given),
        "stack": parse_stack(str(given.get("stack", ""))),
        "beside": parse_beside(given.get("beside", [])),
        **{section: read_flags(section_flags(section), given) for section in sections()},
    }


def parse_beside(given: FlagValue) -> list[dict[str, object]]:
    """`llama_cpp/gguf:type=Q8_0 as eight bits` as the JSON of a stack beside the job's own; each may be left out.

    Raises SpecError as `parse_stack` does, and for an unknown backend.
    """
    return [_beside(text) for text in (given if isinstance(given, list) else [str(given)])]


def _beside(text: str) -> dict[str, object]:
    from optigpu.backends import BACKENDS

    stack, _, label = text.partition(" as ")
    backend, slash, rest = stack.partition("/")
    if not slash or re.search("[:,]", backend):  # the slash is within a parameter: draft=path:models/tiny
        backend, rest = "", stack
    else:
        _known(backend.strip(), list(BACKENDS), "backend")
    named = {"backend": backend.strip(), "label": label.strip()}
    return {"stack": parse_stack(rest)} | {name: value for name, value in named.items() if value}


def parse_stack(text: str) -> list[dict[str, str]]:
    """`bf16,torch_compile:mode=max-autotune` as the JSON of a stack.

    Raises SpecError for an unknown technique, and names the nearest; or for a parameter without a value.
    """
    from optigpu.cli.flags import split

    return [_technique(item) for item in split(text)]


def _technique(item: str) -> dict[str, str]:
    from optigpu.techniques import TECHNIQUES

    name, colon, rest = item.partition(":")
    parameters = re.split(r":(?=\w+=)", rest) if colon else []  # a value may hold a colon: draft=bundled:tiny
    _known(name, list(TECHNIQUES), "technique")
    pairs = [parameter.partition("=") for parameter in parameters]
    if bare := [key for key, equals, _ in pairs if not equals]:
        raise SpecError(f"{name}: write the parameter as {name}:{bare[0] or 'PARAMETER'}=VALUE.")
    return {"name": name} | {key: value for key, _, value in pairs}


def _known(name: str, names: list[str], noun: str) -> None:
    if name in names:
        return
    nearest = [each for each in names if name and name in each] or get_close_matches(name, names, n=1)
    hint = f" Did you mean {nearest[0]}?" if nearest else ""
    raise SpecError(f"There is no {noun} {name!r}.{hint} The {noun}s are {', '.join(names)}.")
