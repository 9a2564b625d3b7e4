"""Commands that need no service: this machine with its techniques and engines, its jobs, and the check of both."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from optigpu.cli.flags import DURATION, SIZE, read_quantity
from optigpu.cli.measuring import default_device, ended_when_stopped, explain, measure, measure_and_show, show
from optigpu.cli.options import Given, SpecFile, parse_stack, spec_of
from optigpu.cli.output import FormatOption, OutputFormat, Verbose, echo, present, show_grid, show_list
from optigpu.vocabulary import BenchMode, DeviceKind, Document, OptiGPUError, Precision, SpecError

if TYPE_CHECKING:
    from optigpu.documents.selftest import SelfTest
    from optigpu.engines.environments import Recipe
    from optigpu.job.estimate import Plan
    from optigpu.job.spec import JobSpec


def probe(format_: FormatOption = OutputFormat.TABLE) -> None:
    """Show this machine: CPU, GPUs, memory, compiler, software."""
    from optigpu.hardware import probe as probe_machine
    from optigpu.report.catalog import environment_grid

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
    from optigpu.report.catalog import technique_facts, techniques_grid

    facts = technique_facts(probe_machine(), device or default_device())
    show_list(techniques_grid(facts), facts, facts, format_)


def run(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
    verbose: Verbose = False,
) -> None:
    """Measure one stack of techniques on this machine, with no service.

    With --plan ladder, --plan ablation or --plan grid it measures many.
    """
    measure_and_show(_for_here(spec_of(given, default_device, spec_file)), format_, verbose=verbose)


def ladder(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
    verbose: Verbose = False,
) -> None:
    """Measure the baseline, each technique alone, and each prefix of the stack.

    Without --stack, the techniques that suit the device, and beside them those that exclude the others: of these as
    many as two minutes allow, unless an option says how to measure. --stack all takes them all.
    """
    spec = _with_plan("ladder", given, spec_file)
    if spec_file is None and not (_how_to_measure() & given.keys()):
        spec = _shortened(spec, may_shorten="new_tokens" not in given)
    measure_and_show(spec, format_, verbose=verbose)


def ablation(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
    verbose: Verbose = False,
) -> None:
    """Measure a ladder and the whole stack without each technique, so that no order decides what a technique buys.

    Without --stack, the techniques that a ladder takes.
    """
    measure_and_show(_with_plan("ablation", given, spec_file), format_, verbose=verbose)


def search(
    given: Given,
    spec_file: SpecFile = None,
    format_: FormatOption = OutputFormat.TABLE,
    verbose: Verbose = False,
) -> None:
    """Search the stacks of a menu of techniques for the best: every stack briefly, the better third for longer.

    The menu is --stack, whose techniques may exclude each other; without it, those that suit the device, int4 and the
    int8 cache. --max-kld and --max-bytes bound what is looked for, --max-variants how many stacks are tried.
    """
    from optigpu.report.tables import pareto_grid

    spec = _for_here(spec_of(given, default_device, spec_file, plan="search"))
    if "stack" not in given and spec_file is None:
        # What suits the device, and two techniques that save memory and cost quality.
        from optigpu.hardware import probe as probe_machine
        from optigpu.job.plan import default_stack
        from optigpu.techniques import TECHNIQUES

        suiting = default_stack(probe_machine(), spec.device, spec.workload, spec.backend)
        more = (TECHNIQUES[name](name=name) for name in ("int4_weight_only", "int8_kv_cache"))
        fitting = (each for each in more if spec.workload.task in each.tasks and each not in suiting)
        spec = spec.model_copy(update={"stack": (*suiting, *fitting)})
    measured = measure(spec)
    show(measured, format_, verbose=verbose)
    if format_ in (OutputFormat.TABLE, OutputFormat.MARKDOWN):
        show_grid(pareto_grid(measured.report), format_)
    measured.end()


def _for_here(spec: "JobSpec") -> "JobSpec":
    """The job, if it is not for a cluster. Raises SpecError."""
    if spec.via is not None:
        raise SpecError(f"via: a service hands jobs to {spec.via}; use `optigpu submit`, or leave via out.")
    return spec


ALL = "all"
"""As --stack: what suits the device, however long it takes."""


def _how_to_measure() -> set[str]:
    """The flags that say what is measured, or how."""
    from optigpu.cli.flags import section_flags

    return {"stack", "beside", *(flag.name for flag in section_flags("measure"))}


def _shortened(spec: "JobSpec", *, may_shorten: bool) -> "JobSpec":
    """The ladder as far as two minutes allow; says what it leaves out."""
    from optigpu.conductor.preparation import needs
    from optigpu.conductor.session import environment_for
    from optigpu.job.estimate import known_rates, plan_time
    from optigpu.job.plan import left_out_of_ladder, shortened, variants_of

    rates, needed = known_rates(), needs(spec, variants_of(spec), environment_for(spec.device))

    def plan_of(ladder: "JobSpec") -> "Plan":
        return plan_time(ladder, variants_of(ladder), rates, needed)

    short = shortened(spec, plan_of, may_shorten=may_shorten)
    if said := left_out_of_ladder(spec, short):
        echo(said, err=True)
    return short


def _with_plan(plan: str, given: Given, spec_file: SpecFile) -> "JobSpec":
    """The job, with the device's usual stack where none is named."""
    takes_all = given.get("stack", ALL) == ALL
    asked = {name: value for name, value in given.items() if name != "stack" or not takes_all}
    spec = _for_here(spec_of(asked, default_device, spec_file, plan=plan))
    if not takes_all or spec_file is not None:
        return spec
    from optigpu.hardware import probe as probe_machine
    from optigpu.job.plan import with_default_stack

    return with_default_stack(spec, probe_machine())


def bench(
    mode: Annotated[
        BenchMode, typer.Option(help="quick takes about two minutes on two cores, full about five.")
    ] = BenchMode.QUICK,
    precision: Annotated[
        Precision, typer.Option(help="What the weights are stored as while the model decodes.")
    ] = Precision.INT4,
    model: Annotated[str, typer.Option(help="The model that decodes.")] = "preset:gpt2",
    device: Annotated[DeviceKind | None, typer.Option(help="Default: cuda where there is a GPU.")] = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Measure this machine: matrix products, attention, decoding, and one line to quote."""
    from optigpu.hardware import probe
    from optigpu.job.bench import bench_specs
    from optigpu.report.tables import bench_line

    specs = bench_specs(probe(), device or default_device(), mode, precision, model)
    measured = []
    for spec in specs:
        done = measure(spec)
        measured.append(done)
        if format_ is not OutputFormat.JSON:
            show(done, format_)
        if done.report.cancelled:
            break
    line = bench_line([(done.document["results"], done.report.attribution) for done in measured])
    document = {"summary": line, "runs": [done.document for done in measured]}
    echo(json.dumps(document, indent=2) if format_ is OutputFormat.JSON else line)
    for done in measured:
        done.end()


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


Only = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only this technique, kernel or meter; may be given several times."),
]


def selftest(
    only: Only = None,
    device: Annotated[
        DeviceKind | None, typer.Option(help="Only the checks of this device. Default: of each.")
    ] = None,
    format_: FormatOption = OutputFormat.TABLE,
) -> None:
    """Check every technique, kernel and meter against its reference on this machine, in about two minutes.

    A technique that fails is not run here until the software changes. Exit status 1 if a check failed.
    """
    from optigpu.conductor.session import environment_for
    from optigpu.conductor.tasks import SelfTester
    from optigpu.report.formats import console
    from optigpu.report.progress import SelfTestProgress, selftest_csv, selftest_grid
    from optigpu.selftest.kept import keep

    outcomes: list[SelfTest] = []
    with (
        ended_when_stopped("{} Nothing of it was kept.") as stop,
        SelfTestProgress(console(stderr=True)) as progress,
    ):
        tester = SelfTester(stop, progress.doing, progress.ended)
        checks = tester.checks(only or (), device)
        progress.expect(len(checks))
        outcomes += tester.run(checks)
    there = [(outcome, environment_for(outcome.device)) for outcome in outcomes]
    present_ones = [(outcome, each) for outcome, each in there if each.has(outcome.device)]
    present(
        format_,
        [outcome.model_dump(mode="json") for outcome in outcomes],
        lambda: selftest_csv(outcomes),
        lambda: [selftest_grid(outcomes, [each for _, each in present_ones])],
    )
    for outcome, environment in present_ones:  # what cannot be kept is said, and changes nothing else
        try:
            echo(f"Kept as {keep(outcome, environment)}.", err=True)
        except OptiGPUError as error:
            echo(str(error), err=True)
    if any(outcome.failed for outcome in outcomes):
        raise typer.Exit(1)


EngineName = Annotated[
    str, typer.Argument(metavar="NAME", help="The engine's backend, as `engines list` has it.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="How many compilers run at once. Default: each core.")]


engines_app = typer.Typer(no_args_is_help=True, help="Engines that have an environment of their own.")


@engines_app.command("list")
def list_engines(format_: FormatOption = OutputFormat.TABLE) -> None:
    """List the engines that have an environment of their own, and whether it is there."""
    from optigpu.report.tables import engine_facts, engines_grid

    facts = engine_facts()
    show_list(engines_grid(facts), facts, facts, format_)


@engines_app.command()
def install(name: EngineName, jobs: Jobs = None) -> None:
    """Make the environment of an engine under the cache folder. Jobs on its backend use it from then on."""
    from optigpu.engines.install import install as make
    from optigpu.hardware.cpu import cpu_cores

    recipe = _recipe(name)
    environment = make(recipe, lambda doing: echo(f"{name}: {doing}", err=True), jobs or cpu_cores())
    echo(f"{name} is installed in {environment.folder}.")


@engines_app.command()
def remove(name: EngineName) -> None:
    """Remove the environment of an engine."""
    from optigpu.engines.install import remove as remove_environment

    was_there = remove_environment(_recipe(name))
    echo(f"{name} is removed." if was_there else f"{name} was not installed.")


def _recipe(name: str) -> "Recipe":
    from optigpu.engines.environments import RECIPES

    if name not in RECIPES:
        raise SpecError(
            f"There is no environment to make for {name!r}; the engines that have one are {', '.join(RECIPES)}."
        )
    return RECIPES[name]
