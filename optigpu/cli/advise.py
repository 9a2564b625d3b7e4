"""Commands that answer without measuring: `advise`, which stack to use, by measurements first and by predictions where
there are none; `fit`, which stacks of a model fit a GPU, predicted, and which boards hold a converted network; and
`claims`: published figures beside measured ones. It reads a service's leaderboard if given its URL."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from optigpu.cli.flags import SIZE, read_quantity
from optigpu.cli.measuring import default_device, ended_when_stopped
from optigpu.cli.options import parse_stack
from optigpu.cli.output import FormatOption, OutputFormat, echo, show_list
from optigpu.cli.remote import ApiKey, connect
from optigpu.vocabulary import METRICS, DeviceKind, Document, ServiceError, SpecError, StoreError

if TYPE_CHECKING:
    from optigpu.claims.matching import Measured
    from optigpu.claims.model import Book
    from optigpu.client import Client
    from optigpu.documents.devices import EdgeBoard
    from optigpu.documents.facts import ModelFacts
    from optigpu.documents.result import Environment
    from optigpu.fit.advice import Advice, Evidence
    from optigpu.fit.fitting import Asked, NamedStack
    from optigpu.hardware.catalog import Device
    from optigpu.job.spec import JobSpec
    from optigpu.models.described import DecoderShape


NOT_THERE = 404
MOST_JOBS = 20
"""The most jobs of the leaderboard's first rows whose reports are read for the speedup of their stacks."""

MaybeUrl = Annotated[
    str | None,
    typer.Option(envvar="OPTIGPU_URL", help="URL of a service whose leaderboard is read too. Default: none."),
]


def claims(
    results: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.JSON",
            help="A file that `optigpu run --format json` wrote; may be given several times.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="Hardware whose peaks the measured gain is compared with. Default: the two devices of the thesis."
        ),
    ] = None,
    format_: FormatOption = OutputFormat.TABLE,
    url: MaybeUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Show published figures: whether they are plausible, and what was measured on the same hardware."""
    from optigpu.claims.matching import from_results
    from optigpu.claims.model import baselines
    from optigpu.claims.thesis import compare_founding, weigh
    from optigpu.report.claims import claim_rows, claims_document, claims_grid

    book = baselines()
    reports = [read_report(path) for path in results or ()]
    measured = [figure for report in reports for figure in from_results(report["results"])]
    boards: list[EdgeBoard] = []
    if url is not None:
        ranked, jobs, boards = _asked(book, url, api_key)
        measured += ranked
        reports += jobs
    rows, thesis = claim_rows(book, measured), weigh(book.thesis, reports, against)
    founding = compare_founding(book, boards)
    document = claims_document(rows, thesis, founding)
    show_list(claims_grid(rows, thesis, founding), document["claims"], document, format_)


def read_report(path: Path) -> Document:
    """The report of a job from a file. Raises SpecError if the file cannot be read or is not the output of `optigpu run
    --format json`."""
    from optigpu.claims.matching import from_results
    from optigpu.claims.thesis import gap_of

    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        from_results(report["results"])
        gap_of(report)
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror}); check the path.") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise SpecError(
            f"{path} is not the report of a job; write one with `optigpu run --format json > {path.name}`."
        ) from None
    found: Document = report
    return found


def _asked(
    book: "Book", url: str, api_key: str | None
) -> tuple[list["Measured"], list[Document], list["EdgeBoard"]]:
    """The leaderboard's figures for the metrics of the claims, the reports of the jobs of the first rows, and the
    boards of edge devices."""
    from optigpu.claims.matching import from_leaderboard, from_results, says_too_little

    with connect(url, api_key) as client:
        metrics = dict.fromkeys(claim.metric for claim in book.claims if claim.metric in METRICS)
        rows = [row for metric in metrics for row in client.leaderboard_rows(metric=metric)]
        whole = dict.fromkeys(row.result_id for row in rows if says_too_little(row))
        figures = from_leaderboard(rows) + from_results(client.result(result) for result in whole)
        jobs = list(dict.fromkeys(row.job_id for row in rows if row.job_id))[:MOST_JOBS]
        return figures, [client.report(job) for job in jobs], _edge_boards(client)


def _edge_boards(client: "Client") -> list["EdgeBoard"]:
    """Those by images per joule; none of an older service, which has no such leaderboard."""
    try:
        return list(client.edge_boards(metric="fps_per_watt"))
    except ServiceError as error:
        if error.status == NOT_THERE:
            return []
        raise


def advise(
    model: Annotated[str, typer.Option(help="The model: preset:NAME, bundled:tiny, path:DIR or a hub name.")],
    gpu: Annotated[
        str | None, typer.Option(help="A GPU of the catalog, in any spelling. Default: this machine.")
    ] = None,
    max_kld: Annotated[
        float | None, typer.Option(min=0, help="The most that the stack may diverge from fp32 (kld_mean).")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt in tokens.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=2, help="How many tokens to decode.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="How many sequences at once.")] = 1,
    format_: FormatOption = OutputFormat.TABLE,
    url: MaybeUrl = None,
    api_key: ApiKey = None,
) -> None:
    """Recommend a stack for a model, with the Python code that measures it.

    Valid results of the same workload, hardware and versions answer first: those of this machine's database, those of
    runs that are kept here, and those of a service if its URL is given. Where there are none, the predicted memory
    decides.
    """
    from optigpu.fit.advice import best_measured
    from optigpu.hardware import probe
    from optigpu.hardware.catalog import find_class, gpu_of
    from optigpu.hardware.probe import hardware_class
    from optigpu.job.spec import JobSpec

    here = probe()
    card = gpu_of(gpu, "gpu") if gpu else None
    device = DeviceKind.CUDA if card else default_device()
    workload = {"kind": "generate", "prompt_tokens": prompt_tokens, "new_tokens": new_tokens}
    spec = JobSpec(workload=workload | {"batch_size": batch_size}, model=model, device=device)
    evidence = list(_evidence(spec, url, api_key))
    hardware = hardware_class(here, device) if card is None else card.name
    if card is not None:
        there = [each for each in evidence if find_class(each.hardware) == card]
        evidence = [each.model_copy(update={"hardware": card.name}) for each in there]
    advice = best_measured(evidence, spec, hardware, here.software, max_kld=max_kld)
    found = advice or _predicted(spec, card, here, hardware, max_kld)
    if format_ is OutputFormat.JSON:
        echo(json.dumps(found.model_dump(mode="json"), indent=2))
    else:
        echo(f"{found.label} ({found.basis})\n{found.reason}\n\n{found.code}", nl=False)


def _evidence(spec: "JobSpec", url: str | None, api_key: str | None) -> "Iterator[Evidence]":
    """Of this machine's database, of the runs that are kept here, and of a service. A database that cannot be read is
    named on stderr and answers nothing."""
    from optigpu.fit.advice import evidence_of
    from optigpu.runs import kept_runs
    from optigpu.store import results
    from optigpu.store.database import local_database

    try:
        database = local_database()
        if database is not None:
            with closing(database), database.read() as session:
                found = results.of_workload(session, spec.workload.kind, spec.model)
            yield from evidence_of(found, spec, "the database of this machine")
    except StoreError as error:
        echo(f"The local database was not asked. {error}", err=True)
    for run in kept_runs():
        yield from evidence_of(run.results, spec, f"run {run.id}, kept here")
    if url:
        with connect(url, api_key) as client:
            rows = client.leaderboard_rows(model=spec.model, workload=spec.workload.kind)
            found = [client.result(row.result_id) for row in rows if not row.reasons]
        yield from evidence_of(found, spec, url)


def _predicted(
    spec: "JobSpec", card: "Device | None", here: "Environment", hardware: str, max_kld: float | None
) -> "Advice":
    from optigpu.fit.advice import best_predicted
    from optigpu.fit.fitting import Asked, cpu_stacks, fit, usual_stacks
    from optigpu.hardware.catalog import Device, HardwareKind, find
    from optigpu.models.described import decoder_shape
    from optigpu.models.reference import parse_reference

    shape = decoder_shape(parse_reference(str(spec.model)))
    if card is None and spec.device is DeviceKind.CUDA:
        gpu = here.accelerators[0]
        known = find(gpu.name)
        own = {"name": gpu.name, "memory_bytes": gpu.memory_bytes}
        card = (
            known.model_copy(update=own) if known else Device(kind=HardwareKind.GPU, source="driver", **own)
        )
    stacks = usual_stacks(card, shape.facts) if card else cpu_stacks()
    place = card or Device(
        name=here.cpu_model, kind=HardwareKind.CPU, memory_bytes=here.memory_bytes, source="probe"
    )
    load = spec.workload.model_dump()
    asked = Asked(
        batch=load["batch_size"],
        context=load["prompt_tokens"] + load["new_tokens"],
        new_tokens=load["new_tokens"],
        device=spec.device,
    )
    found = fit(shape, place, stacks, asked)
    return best_predicted(found, stacks, spec, hardware, max_kld=max_kld)


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
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Predict whether a model fits: a GPU with each stack of techniques, or a microcontroller's board.

    For a GPU: weights, cache and activations, the most tokens of a sequence and the most sequences. For boards, which
    hold a converted network, and how fast published figures say that it is there; exit status 1 if --board names one
    that cannot hold it.
    """
    if manifest is not None:
        if model or gpu:
            raise SpecError("Give MANIFEST for boards, or --model and --gpu for a GPU, not both.")
        _show_boards(manifest, board, format_)
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
        _show_training(model, gpu, batch, context, stack, kept_free, format_)
        return
    reference, card = parse_reference(model), gpu_of(gpu, "gpu")
    shape = decoder_shape(reference)
    asked = Asked(batch=batch, context=context, new_tokens=new_tokens, reserve_bytes=kept_free)
    if plan == "several-gpus":
        _show_several(shape, card, stack, asked, link, format_)
        return
    if link is not None:
        raise SpecError("link: it is about several GPUs; add --plan several-gpus.")
    found = fitted(shape, card, _stacks(stack, plan, card, shape.facts), asked)
    document = found.model_dump(mode="json")
    show_list(fit_grid(found), document["stacks"], document, format_)


def _show_several(
    shape: "DecoderShape",
    card: "Device",
    stack: str | None,
    asked: "Asked",
    link: str | None,
    form: OutputFormat,
) -> None:
    from optigpu.fit.fitting import fit_several
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
    from optigpu.fit.memory import USUAL, TrainingAsked
    from optigpu.hardware.catalog import gpu_of
    from optigpu.job.spec import JobSpec
    from optigpu.report.fit import training_grid
    from optigpu.report.formats import console

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
    from optigpu.report.fit import board_grid, board_records

    found = judge(read_manifest(manifest), board)
    show_list(board_grid(found), board_records(found), found.model_dump(mode="json"), form)
    if board is not None and not found.boards[0].fits:
        raise typer.Exit(1)
