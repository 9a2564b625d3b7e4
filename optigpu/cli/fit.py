"""The command `fit`: which stacks of a model fit a GPU, predicted."""

import json
from enum import StrEnum
from typing import Annotated

import typer

from optigpu.cli.options import parse_stack
from optigpu.cli.output import FormatOption, OutputFormat, show_list
from optigpu.cli.quantities import SIZE, read_quantity


class FitPlan(StrEnum):
    """Which stacks are tried."""

    USUAL = "usual"
    MEMORY_LADDER = "memory-ladder"


def add_commands(app: typer.Typer) -> None:
    app.command()(fit)


def fit(
    model: Annotated[str, typer.Option(help="The model: preset:NAME, bundled:tiny, path:DIR or a hub name.")],
    gpu: Annotated[str, typer.Option(help="A GPU of the catalog, in any spelling: rtx4060, A100 SXM 80GB.")],
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence, prompt and new ones together. Default: 2048, or the model's context."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="How many sequences at once.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=1, help="How many of a sequence's tokens are new.")] = 128,
    stack: Annotated[
        str | None, typer.Option(help="Only this stack, for example bf16,nf4. Default: the usual ones.")
    ] = None,
    plan: Annotated[FitPlan, typer.Option(help="Which stacks to try.")] = FitPlan.USUAL,
    reserve: Annotated[
        str | None, typer.Option(help="Memory that is kept free, such as 1GB. Default: 768MiB.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON; as --format json.")] = False,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Predict whether a model fits a GPU: weights, cache and activations with each stack, and how far the card goes."""
    from optigpu.documents.fields import refusing
    from optigpu.fit.cards import gpu_named
    from optigpu.fit.fitting import RESERVE_BYTES, Asked
    from optigpu.fit.fitting import fit as fitted
    from optigpu.fit.stacks import memory_ladder, stack_of, usual_stacks
    from optigpu.job.spec import Beside
    from optigpu.models.reference import parse_reference, preset_of
    from optigpu.models.tensors import decoder_shape
    from optigpu.report.fit import fit_grid
    from optigpu.vocabulary import SpecError

    if stack is not None and plan is not FitPlan.USUAL:
        raise SpecError("plan: memory-ladder has its own stacks; give --stack or --plan, not both.")
    reference, card = parse_reference(model), gpu_named(gpu)
    shape, preset = decoder_shape(reference), preset_of(reference)
    if stack is not None:
        with refusing(Beside):
            stacks = (stack_of(Beside.model_validate({"stack": parse_stack(stack)}).stack),)
    elif plan is FitPlan.MEMORY_LADDER:
        stacks = memory_ladder()
    else:
        stacks = usual_stacks(card, shape.facts)
    kept_free = RESERVE_BYTES if reserve is None else int(read_quantity(reserve, SIZE, "reserve"))
    asked = Asked(batch=batch, context=context, new_tokens=new_tokens, reserve_bytes=kept_free)
    found = fitted(shape, preset.parameters if preset else None, card, stacks, asked)
    document = found.model_dump(mode="json")
    if json_:
        typer.echo(json.dumps(document, indent=2))
    else:
        show_list(fit_grid(found), document["stacks"], document, format_)
