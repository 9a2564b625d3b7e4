"""The command `batch-scaling`: the largest batch that fits under a limit of memory, plain and with a stack."""

from typing import Annotated

import typer

from optigpu.cli.flags import DURATION, SIZE, read_quantity
from optigpu.cli.measuring import default_device, explain, measure, show
from optigpu.cli.options import parse_stack
from optigpu.cli.output import FormatOption, OutputFormat, show_grid
from optigpu.vocabulary import DeviceKind, Document, SpecError


def batch_scaling(
    limit: Annotated[str, typer.Option(help="Memory for weights, states and activations, such as 2GB.")],
    model: Annotated[str, typer.Option(help="The model.")] = "preset:gpt2",
    workload: Annotated[str, typer.Option(help="train_step or generate.")] = "train_step",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a row or a prompt.")] = 128,
    stack: Annotated[
        str, typer.Option(help="What is compared with no technique.")
    ] = "gradient_checkpointing",
    most: Annotated[int, typer.Option(min=1, max=4096, help="The largest batch to try.")] = 256,
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    timeout: Annotated[str, typer.Option(help="How long it may take, such as 10m.")] = "30m",
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Find the largest batch under a limit of memory, by processes that really run out of it.

    The limit is enforced while requests run, and holds for what is taken after the libraries are loaded. The same job
    is posted to a service as the plan batch_scaling.
    """
    from optigpu.job.spec import JobSpec
    from optigpu.report.tables import batch_grid

    limits = {
        "max_bytes": read_quantity(limit, SIZE, "limit"),
        "max_batch": most,
        "timeout_s": read_quantity(timeout, DURATION, "timeout"),
        "wait_for_quiet_s": 0,
    }
    spec = JobSpec.model_validate(
        {
            "workload": _shape(workload, tokens),
            "model": model,
            "device": device or default_device(),
            "plan": "batch_scaling",
            "stack": parse_stack(stack),
            "limits": limits,
        }
    )
    measured = measure(spec)
    if format_ in (OutputFormat.JSON, OutputFormat.CSV):
        show(measured, format_)
    else:
        show_grid(batch_grid(measured.report), format_)
        explain(measured)
    measured.end()


def _shape(kind: str, tokens: int) -> Document:
    shapes: dict[str, Document] = {
        "train_step": {"sequence_tokens": tokens},
        "generate": {"prompt_tokens": tokens, "new_tokens": 2},
    }
    if kind not in shapes:
        raise SpecError(f"workload: {kind!r} has no batch to scale; the valid ones are {', '.join(shapes)}.")
    return {"kind": kind, **shapes[kind]}
