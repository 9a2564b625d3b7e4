"""The command `batch-scaling`: the largest batch that fits under a limit of memory, plain and with a stack."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from optigpu.cli.measuring import default_device
from optigpu.cli.options import parse_stack
from optigpu.cli.output import FormatOption, OutputFormat, show_list
from optigpu.cli.quantities import SIZE, read_quantity
from optigpu.vocabulary import DeviceKind, SpecError

if TYPE_CHECKING:
    from optigpu.conductor.largest_batch import LargestBatch
    from optigpu.report import Grid


def add_commands(app: typer.Typer) -> None:
    app.command()(batch_scaling)


def batch_scaling(
    limit: Annotated[str, typer.Option(help="Memory for weights, states and activations, such as 2GB.")],
    model: Annotated[str, typer.Option(help="The model.")] = "preset:gpt2",
    workload: Annotated[str, typer.Option(help="train_step or generate.")] = "train_step",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a row or a prompt.")] = 128,
    stack: Annotated[
        str, typer.Option(help="What is compared with no technique.")
    ] = "gradient_checkpointing",
    most: Annotated[int, typer.Option(min=1, max=1024, help="The largest batch to try.")] = 256,
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Find the largest batch under a limit of memory, by processes that really run out of it.

    The limit is enforced while requests run, and holds for what is taken after the libraries are loaded.
    """
    from optigpu.conductor.largest_batch import largest_batch
    from optigpu.job.spec import JobSpec

    shapes: dict[str, dict[str, Any]] = {
        "train_step": {"sequence_tokens": tokens},
        "generate": {"prompt_tokens": tokens, "new_tokens": 2},
    }
    if workload not in shapes:
        raise SpecError(
            f"workload: {workload!r} has no batch to scale; the valid ones are {', '.join(shapes)}."
        )
    limit_bytes = int(read_quantity(limit, SIZE, "limit"))
    asked = {
        "workload": {"kind": workload} | shapes[workload],
        "model": model,
        "device": device or default_device(),
    }
    specs = [JobSpec.model_validate(asked | {"stack": each}) for each in ([], parse_stack(stack))]
    found = [largest_batch(spec, limit_bytes, most) for spec in specs]
    documents = [each.model_dump(mode="json") for each in found]
    show_list(_grid(found, limit_bytes), documents, {"largest": documents}, format_)


def _grid(found: "list[LargestBatch]", limit_bytes: int) -> "Grid":
    from optigpu.report.formats import Column, Grid

    plain = found[0].largest
    return Grid(
        title=f"Largest batch under {limit_bytes / 1e9:.3g} GB",
        columns=(
            Column("stack"),
            Column("largest batch", right=True),
            Column("times as many", right=True),
            Column("attempts", right=True),
        ),
        rows=tuple(
            (
                each.label,
                str(each.largest),
                f"{each.largest / plain:.2f}" if plain else "-",
                str(len(each.tried)),
            )
            for each in found
        ),
    )
