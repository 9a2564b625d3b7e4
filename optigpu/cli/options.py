"""A job from flags or from a file. The flags come from the job's models, which are imported only when a command is
called: JobSpec loads every technique, which `optigpu --help` need not wait for."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from optigpu.documents.endpoints import ENDPOINT
from optigpu.documents.fields import read_json
from optigpu.vocabulary import DeviceKind, Document, SpecError

if TYPE_CHECKING:
    from optigpu.cli.flags import Flag
    from optigpu.job.spec import JobSpec

FlagValue = int | float | str | bool | list[str]
Given = Mapping[str, FlagValue]
"""The flags that were used, by their name."""
Panels = Mapping[str, Sequence["Flag"]]
"""The flags under each heading of the help."""
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


def job_panels() -> Panels:
    """Every flag of a job."""
    from optigpu.cli.flags import job_flags, section_flags, sections, workload_flags

    own = {"Job": job_flags(), "Workload": workload_flags()}
    return own | {_heading(section): section_flags(section) for section in sections()}


def ladder_panels() -> Panels:
    """Every flag of a job whose plan the command sets."""
    panels = job_panels()
    return {**panels, "Job": [flag for flag in panels["Job"] if flag.field != "plan"]}


def replay_panels() -> Panels:
    """The flags of `replay` that change how a result is measured again."""
    from optigpu.cli.flags import section_flags

    return {_heading(name): section_flags(name, with_defaults=False) for name in ("measure", "limits")}


def query_panels() -> Panels:
    """The filters of the leaderboard."""
    from optigpu.cli.flags import model_flags
    from optigpu.documents.queries import LeaderboardQuery

    return {"Filters": model_flags(LeaderboardQuery, with_defaults=False)}


def recipe_panels() -> Panels:
    """The flags of a recipe, besides those that the command has itself."""
    from optigpu.cli.flags import model_flags
    from optigpu.recipes.request import RecipeRequest

    flags = [flag for flag in model_flags(RecipeRequest) if flag.field not in ("recipe", "output")]
    return {"Recipe": flags}


def _heading(section: str) -> str:
    return {"measure": "Measurement", "target": "Worker"}.get(section, section.capitalize())


def add_flagged(app: typer.Typer, command: Callable[..., None], panels: Callable[[], Panels]) -> None:
    """Adds a command whose first parameter is the mapping of the flags that were used."""

    class Flagged(TyperCommand):
        """A placeholder that builds the command when it is called."""

        def make_context(self, *arguments: Any, **options: Any) -> Any:
            alone = typer.Typer(add_completion=False)
            alone.command(command.__name__)(_with_flags(command, panels()))
            return typer.main.get_command(alone).make_context(*arguments, **options)

    app.command(command.__name__, cls=Flagged, help=command.__doc__)(lambda: None)


def _with_flags(command: Callable[..., None], panels: Panels) -> Callable[..., None]:
    """The command with the flags in place of its first parameter."""
    flags = [flag.parameter(panel) for panel, flags in panels.items() for flag in flags]
    _, *own = signature(command).parameters.values()

    def with_flags(**values: object) -> None:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        # typer gives an empty list for a repeated flag that was not used
        command({name: value for name, value in given.items() if value not in (None, [])}, **values)

    # those without a default first, as a signature needs them
    with_flags.__doc__ = command.__doc__
    with_flags.__dict__["__signature__"] = Signature(
        sorted([*flags, *own], key=lambda each: each.default is not Parameter.empty)
    )
    return with_flags
