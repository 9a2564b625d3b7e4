"""Commands that need no service: probe, techniques, run, ladder."""

from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flagged import Given, add_flagged, job_panels, ladder_panels
from optigpu.cli.interrupt import stoppable
from optigpu.cli.options import SpecFile, spec_of
from optigpu.cli.output import AsJson, FormatOption, OutputFormat, show_job
from optigpu.vocabulary import DeviceKind, SpecError, VariantStatus

if TYPE_CHECKING:
    from optigpu.documents.events import Event
    from optigpu.job.spec import JobSpec


def add_commands(app: typer.Typer) -> None:
    app.command()(probe)
    app.command()(techniques)
    add_flagged(app, run, job_panels)
    add_flagged(app, ladder, ladder_panels)


def probe(json_: AsJson = False) -> None:
    """Show this machine: CPU, GPUs, memory, compiler, software."""
    from optigpu.hardware import probe as probe_machine
    from optigpu.report import console, environment_grid, terminal

    environment = probe_machine()
    if json_:
        typer.echo(environment.model_dump_json(indent=2))
    else:
        console().print(terminal(environment_grid(environment)))


def techniques(
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    json_: AsJson = False,
) -> None:
    """List every technique: what it does, what it requires, and whether it works on this machine."""
    import json

    from optigpu.hardware import probe as probe_machine
    from optigpu.report import console, technique_facts, techniques_grid, terminal

    environment = probe_machine()
    facts = technique_facts(environment, device or default_device())
    if json_:
        typer.echo(json.dumps(facts, indent=2))
    else:
        console().print(terminal(techniques_grid(facts)))


def run(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
    json_: AsJson = False,
) -> None:
    """Measure one stack of techniques on this machine, with no service.

    With --plan ladder or --plan grid it measures many.
    """
    _measure(spec_of(given, default_device, spec_file), OutputFormat.JSON if json_ else format_)


def ladder(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
    json_: AsJson = False,
) -> None:
    """Measure the baseline, each technique alone, and each prefix of the stack.

    Without --stack, the techniques that suit the device, and beside them those that exclude the others.
    """
    spec = spec_of(given, default_device, spec_file, plan="ladder")
    if "stack" not in given and spec_file is None:
        spec = with_default_stack(spec)
    _measure(spec, OutputFormat.JSON if json_ else format_)


def default_device() -> DeviceKind:
    """CUDA where this machine has a GPU, else the CPU."""
    from optigpu.hardware import probe as probe_machine

    return DeviceKind.CUDA if probe_machine().has(DeviceKind.CUDA) else DeviceKind.CPU


def with_default_stack(spec: "JobSpec") -> "JobSpec":
    """The job with the techniques that suit its device on this machine, those that exclude the others beside them."""
    from optigpu.hardware import probe as probe_machine
    from optigpu.job.plan import default_beside, default_stack

    about = (probe_machine(), spec.device, spec.workload, spec.backend)
    beside = spec.beside or default_beside(*about, spec.model)
    return spec.model_copy(update={"stack": default_stack(*about), "beside": beside})


def _refuse_other_gpus(spec: "JobSpec") -> None:
    """Raises SpecError if the job asks for another GPU than the one of this machine that it would run on."""
    from optigpu.hardware import probe as probe_machine

    found = probe_machine().accelerators[:1] if spec.device is DeviceKind.CUDA else ()
    for gpu in found:
        if (spec.target.gpu or "").lower() not in gpu.name.lower():
            raise SpecError(
                f"target.gpu: this machine's GPU is {gpu.name}; leave --gpu out, or submit the job."
            )
        if gpu.memory_bytes < spec.target.min_vram_bytes:
            raise SpecError(
                f"target.min_vram_bytes: this machine's GPU has {gpu.memory_bytes} bytes; lower --min-vram, or submit "
                "the job."
            )


def _measure(spec: "JobSpec", form: OutputFormat) -> None:
    """Runs the job with progress on stderr and shows it.

    Exit status 1 if no variant succeeded, and 130 if Ctrl-C stopped it (143: SIGTERM).
    """
    from optigpu.documents.events import as_document
    from optigpu.report import RunProgress, console
    from optigpu.run import run as run_job
    from optigpu.runs import Keeper

    _refuse_other_gpus(spec)
    keeper = Keeper()
    with stoppable() as stop, RunProgress(console(stderr=True)) as progress:

        def show(event: "Event") -> None:
            keeper.saw(event)
            progress.show(event.kind, as_document(event))

        report = run_job(spec, show, cancelled=stop)
    show_job(report.document(), report.attribution, form)
    if report.results:
        kept = keeper.keep(report)
        typer.echo(f"Kept as {kept.path}; `optigpu show last` shows it again.", err=True)
    if report.stopped:
        typer.echo(report.stopped, err=True)
    if report.cancelled:
        raise typer.Exit(stop.status)
    if not any(outcome.status is VariantStatus.SUCCEEDED for outcome in report.outcomes):
        raise typer.Exit(1)
