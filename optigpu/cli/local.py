"""Commands that need no service: probe, techniques, run, ladder, ablation."""

from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flagged import Given
from optigpu.cli.measuring import default_device, measure, measure_and_show, show
from optigpu.cli.options import SpecFile, spec_of
from optigpu.cli.output import FormatOption, OutputFormat, show_grid, show_list
from optigpu.vocabulary import DeviceKind, SpecError

if TYPE_CHECKING:
    from optigpu.job.spec import JobSpec


def probe(format_: FormatOption = OutputFormat.TABLE) -> None:
    """Show this machine: CPU, GPUs, memory, compiler, software."""
    from optigpu.hardware import probe as probe_machine
    from optigpu.report import environment_grid

    environment = probe_machine()
    grid = environment_grid(environment)
    records = [{"what": what, "value": value} for what, value in grid.rows]
    show_list(grid, records, environment.model_dump(mode="json"), format_)


def techniques(
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """List every technique: what it does, what it requires, and whether it works on this machine."""
    from optigpu.hardware import probe as probe_machine
    from optigpu.report import technique_facts, techniques_grid

    facts = technique_facts(probe_machine(), device or default_device())
    show_list(techniques_grid(facts), facts, facts, format_)


def run(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure one stack of techniques on this machine, with no service.

    With --plan ladder, --plan ablation or --plan grid it measures many.
    """
    measure_and_show(_for_here(spec_of(given, default_device, spec_file)), format_)


def ladder(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure the baseline, each technique alone, and each prefix of the stack.

    Without --stack, the techniques that suit the device, and beside them those that exclude the others.
    """
    measure_and_show(_with_plan("ladder", given, spec_file), format_)


def ablation(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure a ladder and the whole stack without each technique, so that no order decides what a technique buys.

    Without --stack, the techniques that a ladder takes.
    """
    measure_and_show(_with_plan("ablation", given, spec_file), format_)


def search(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Search the stacks of a menu of techniques for the best: every stack briefly, the better third for longer.

    The menu is --stack, whose techniques may exclude each other; without it, those that suit the device, int4 and the
    int8 cache. --max-kld and --max-bytes bound what is looked for, --max-variants how many stacks are tried.
    """
    from optigpu.report.tables import pareto_grid

    spec = _for_here(spec_of(given, default_device, spec_file, plan="search"))
    if "stack" not in given and spec_file is None:
        spec = with_default_menu(spec)
    measured = measure(spec)
    show(measured, format_)
    if format_ in (OutputFormat.TABLE, OutputFormat.MARKDOWN):
        show_grid(pareto_grid(measured.report), format_)
    measured.end()


def with_default_menu(spec: "JobSpec") -> "JobSpec":
    """The job with what suits its device as its menu, and with two techniques that save memory and cost quality."""
    from optigpu.hardware import probe as probe_machine
    from optigpu.job.plan import default_stack
    from optigpu.techniques import TECHNIQUES

    suiting = default_stack(probe_machine(), spec.device, spec.workload, spec.backend)
    more = (TECHNIQUES[name](name=name) for name in ("int4_weight_only", "int8_kv_cache"))
    fitting = (each for each in more if spec.workload.task in each.tasks and each not in suiting)
    return spec.model_copy(update={"stack": (*suiting, *fitting)})


def _for_here(spec: "JobSpec") -> "JobSpec":
    """The job, if it is not for a cluster. Raises SpecError."""
    if spec.via is not None:
        raise SpecError(f"via: a service hands jobs to {spec.via}; use `optigpu submit`, or leave via out.")
    return spec


def _with_plan(plan: str, given: Given, spec_file: SpecFile) -> "JobSpec":
    """The job, with the device's usual stack where none is named."""
    spec = _for_here(spec_of(given, default_device, spec_file, plan=plan))
    if "stack" in given or spec_file is not None:
        return spec
    from optigpu.hardware import probe as probe_machine
    from optigpu.job.plan import with_default_stack

    return with_default_stack(spec, probe_machine())
