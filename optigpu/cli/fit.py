"""The command `fit`: which stacks of a model fit a GPU, predicted, and which boards hold a converted network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optigpu.cli.flags import SIZE, read_quantity
from optigpu.cli.measuring import ended_when_stopped
from optigpu.cli.options import parse_stack
from optigpu.cli.output import FormatOption, JsonToo, OutputFormat, show_list
from optigpu.vocabulary import SpecError

if TYPE_CHECKING:
    from optigpu.documents.shapes import ModelFacts
    from optigpu.fit.fitting import Asked, NamedStack
    from optigpu.hardware.catalog import Device
    from optigpu.models.tensors import DecoderShape


FitPlan = Literal["usual", "memory-ladder", "several-gpus"]


def fit(
    manifest: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MANIFEST]",
            help="manifest.json, or the folder that `optigpu convert` wrote: for boards.",
        ),
    ] = None,
    board: Annotated[
        str | None, typer.Option(help="With MANIFEST: only this board, such as esp32s3-n16r8.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A decoder: preset:NAME, bundled:tiny, path:DIR or a hub name.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="With --model: a GPU, in any spelling: rtx4060, A100 SXM 80GB.")
    ] = None,
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
    plan: Annotated[FitPlan, typer.Option(help="Which stacks to try.")] = "usual",
    reserve: Annotated[str, typer.Option(help="Memory that is kept free, such as 1GB.")] = "768MiB",
    train: Annotated[
        bool, typer.Option("--train", help="Predict steps of training: --batch rows of --context tokens.")
    ] = False,
    link: Annotated[
        str | None,
        typer.Option(help="With --plan several-gpus: what a GPU sends in a second, such as 450GB."),
    ] = None,
    json_: JsonToo = False,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Predict whether a model fits: a GPU with each stack of techniques, or a microcontroller's board.

    For a GPU: weights, cache and activations, the most tokens of a sequence and the most sequences. For boards, which
    hold a converted network, and how fast published figures say that it is there; exit status 1 if --board names one
    that cannot hold it.
    """
    form = OutputFormat.JSON if json_ else format_
    if manifest is not None:
        if model or gpu:
            raise SpecError("Give MANIFEST for boards, or --model and --gpu for a GPU, not both.")
        _show_boards(manifest, board, form)
        return
    if model is None or gpu is None:
        raise SpecError(
            "Give --model and --gpu for a GPU, or the MANIFEST of a converted network for boards."
        )
    from optigpu.fit.fitting import Asked
    from optigpu.fit.fitting import fit as fitted
    from optigpu.hardware.catalog import gpu_of
    from optigpu.models.described import decoder_shape
    from optigpu.models.reference import parse_reference
    from optigpu.report.fit import fit_grid

    kept_free = int(read_quantity(reserve, SIZE, "reserve"))
    if train:
        _show_training(model, gpu, batch, context, stack, kept_free, form)
        return
    reference, card = parse_reference(model), gpu_of(gpu, "gpu")
    shape = decoder_shape(reference)
    asked = Asked(batch=batch, context=context, new_tokens=new_tokens, reserve_bytes=kept_free)
    if plan == "several-gpus":
        _show_several(shape, card, stack, asked, link, form)
        return
    if link is not None:
        raise SpecError("link: it is about several GPUs; add --plan several-gpus.")
    found = fitted(shape, card, _stacks(stack, plan, card, shape.facts), asked)
    document = found.model_dump(mode="json")
    show_list(fit_grid(found), document["stacks"], document, form)


def _show_several(
    shape: "DecoderShape",
    card: "Device",
    stack: str | None,
    asked: "Asked",
    link: str | None,
    form: OutputFormat,
) -> None:
    from optigpu.fit.several import fit_several
    from optigpu.report.fit import several_grid

    speed = None if link is None else read_quantity(link, SIZE, "link")
    (named,) = _stacks(stack or "bf16", "usual", card, shape.facts)
    found = fit_several(shape, card, named, asked, speed)
    document = found.model_dump(mode="json")
    show_list(several_grid(found), document["divisions"], document, form)


def _show_training(
    model: str,
    gpu: str,
    batch: int,
    tokens: int | None,
    stack: str | None,
    kept_free: int,
    form: OutputFormat,
) -> None:
    from optigpu.conductor.tasks import fit_training
    from optigpu.fit.training import USUAL, TrainingAsked
    from optigpu.hardware.catalog import gpu_of
    from optigpu.job.spec import JobSpec
    from optigpu.report import console
    from optigpu.report.fit import training_grid

    stacks = [parse_stack(stack)] if stack else [[{"name": name} for name in each] for each in USUAL]
    length = 512 if tokens is None else tokens
    workload = {"kind": "train_step", "batch_size": batch, "sequence_tokens": length}
    # Wrong names, conflicts and shapes are answered as for a job.
    specs = [JobSpec.model_validate({"workload": workload, "model": model, "stack": each}) for each in stacks]
    asked = TrainingAsked(str(specs[0].model), gpu_of(gpu, "gpu"), batch, length, kept_free)
    with ended_when_stopped() as stop, console(stderr=True).status("starting") as status:
        found = fit_training(asked, [spec.stack for spec in specs], status.update, stop)
    document = found.model_dump(mode="json")
    show_list(training_grid(found), document["stacks"], document, form)


def _stacks(
    stack: str | None, plan: FitPlan, card: "Device", facts: "ModelFacts"
) -> "tuple[NamedStack, ...]":
    from optigpu.documents.fields import refusing
    from optigpu.fit.fitting import memory_ladder, stack_of, usual_stacks
    from optigpu.job.spec import Beside

    if stack is not None and plan != "usual":
        raise SpecError("plan: memory-ladder has its own stacks; give --stack or --plan, not both.")
    if stack is not None:
        with refusing(Beside):
            return (stack_of(Beside.model_validate({"stack": parse_stack(stack)}).stack),)
    return memory_ladder() if plan == "memory-ladder" else usual_stacks(card, facts)


def _show_boards(manifest: Path, board: str | None, form: OutputFormat) -> None:
    from optigpu.documents.manifest import read_manifest
    from optigpu.edge.fit import fit as judge
    from optigpu.report.edge import fit_grid, fit_records

    found = judge(read_manifest(manifest), board)
    show_list(fit_grid(found), fit_records(found), found.model_dump(mode="json"), form)
    if board is not None and not found.boards[0].fits:
        raise typer.Exit(1)
