"""The flags that describe a job, and how they become a JobSpec."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from optigpu.vocabulary import DeviceKind, SpecError

if TYPE_CHECKING:
    from optigpu.job.spec import JobSpec


@dataclass(frozen=True)
class JobOptions:
    """What can be said of a job on the command line; None leaves the default of JobSpec."""

    spec_file: Annotated[
        Path | None, typer.Argument(metavar="SPEC.JSON", help="A job as JSON, instead of the flags.")
    ] = None
    workload: Annotated[
        str | None,
        typer.Option(
            help="What to run: generate (the default), prefill, kv_cache, batch_sweep, quality, classify, matmul, "
            "attention or normalization."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="preset:NAME, bundled:tiny, hub:ORG/NAME@REVISION or path:DIR. Default: preset:gpt2; for classify "
            "preset:resnet-50, for quality bundled:tiny."
        ),
    ] = None
    prompt_tokens: Annotated[
        int | None, typer.Option(help="generate, prefill, batch_sweep: length of the prompt.")
    ] = None
    new_tokens: Annotated[
        int | None, typer.Option(help="generate, kv_cache, batch_sweep: how many tokens to decode.")
    ] = None
    batch_size: Annotated[int | None, typer.Option(help="How many prompts, sequences or images at once.")] = (
        None
    )
    positions: Annotated[str | None, typer.Option(help="kv_cache: for example 32,128,256.")] = None
    batch_sizes: Annotated[str | None, typer.Option(help="batch_sweep: for example 1,2,4,8.")] = None
    window: Annotated[int | None, typer.Option(help="quality: how many tokens a window of text has.")] = None
    image_size: Annotated[int | None, typer.Option(help="classify: the images' side in pixels.")] = None
    lengths: Annotated[str | None, typer.Option(help="attention: for example 512,1024.")] = None
    widths: Annotated[str | None, typer.Option(help="normalization: for example 768,4096.")] = None
    implementations: Annotated[
        str | None, typer.Option(help="attention, normalization: standard,fused or one of them.")
    ] = None
    dtype: Annotated[
        str | None, typer.Option(help="attention, normalization: float32, float16 or bfloat16.")
    ] = None
    sizes: Annotated[
        str | None, typer.Option(help="matmul: sides of the matrices, for example 512,1024.")
    ] = None
    dtypes: Annotated[str | None, typer.Option(help="matmul: for example float32,bfloat16.")] = None
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU.")] = None
    stack: Annotated[
        str | None,
        typer.Option(help="Techniques, for example int8_weight_only,torch_compile:mode=max-autotune."),
    ] = None
    replicates: Annotated[int | None, typer.Option(help="Processes for each variant.")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of weights and inputs.")] = None
    min_seconds: Annotated[float | None, typer.Option(help="Least time to measure a process.")] = None
    max_seconds: Annotated[float | None, typer.Option(help="Most time to measure a process.")] = None

    def given_flags(self) -> list[str]:
        """The flags that were used, as they are written."""
        names = [field.name for field in fields(self) if field.name != "spec_file"]
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]


def takes_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags of JobOptions where its first parameter stands."""
    own = list(signature(command).parameters.values())[1:]
    flags = [
        Parameter(field.name, Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=field.type)
        for field in fields(JobOptions)
    ]

    @wraps(command)
    def with_flags(**given: Any) -> None:
        options = JobOptions(**{field.name: given.pop(field.name) for field in fields(JobOptions)})
        command(options, **given)

    with_flags.__signature__ = Signature([*flags, *own])  # type: ignore[attr-defined]
    return with_flags


def spec_of(options: JobOptions, device: Callable[[], DeviceKind], plan: str | None = None) -> "JobSpec":
    """The job that the flags or the file describe. `device()` is asked only when neither says one.

    Raises SpecError that says which field is wrong.
    """
    document = _from_file(options) if options.spec_file else _from_flags(options)
    if not document.get("device"):
        document["device"] = device()
    if plan:
        document["plan"] = plan
    return validated(document)


def validated(document: Mapping[str, Any]) -> "JobSpec":
    """The document as a JobSpec. Raises SpecError with a line for each field that is wrong."""
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


def _from_file(options: JobOptions) -> dict[str, Any]:
    path = options.spec_file
    assert path is not None
    if flags := options.given_flags():
        raise SpecError(f"Give {path} or flags, not both: put {', '.join(flags)} into the file.")
    try:
        document = json.loads(path.read_text())
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise SpecError(f"{path} must hold one JSON object, a job.")
    return document


def _from_flags(options: JobOptions) -> dict[str, Any]:
    from optigpu.workloads import WORKLOADS

    kind = options.workload or "generate"
    _known(kind, list(WORKLOADS), "workload")
    shapes = {
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "batch_size": options.batch_size,
        "positions": _split(options.positions),
        "batch_sizes": _split(options.batch_sizes),
        "window": options.window,
        "image_size": options.image_size,
        "lengths": _split(options.lengths),
        "widths": _split(options.widths),
        "implementations": _split(options.implementations),
        "dtype": options.dtype,
        "sizes": _split(options.sizes),
        "dtypes": _split(options.dtypes),
    }
    measure = {name: getattr(options, name) for name in ("replicates", "min_seconds", "max_seconds")}
    model = options.model or (WORKLOADS[kind].example_model if WORKLOADS[kind].task.needs_model else None)
    document: dict[str, Any] = {
        "workload": {"kind": kind} | _given(shapes),
        "stack": parse_stack(options.stack or ""),
        "measure": _given(measure),
    }
    return document | _given({"model": model, "device": options.device, "seed": options.seed})


def parse_stack(text: str) -> list[dict[str, str]]:
    """`bf16,torch_compile:mode=max-autotune` as the JSON of a stack.

    Raises SpecError for an unknown technique, and names the nearest; or for a parameter without a value.
    """
    return [_technique(item) for item in _split(text) or []]


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


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
