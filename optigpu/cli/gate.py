"""The commands `gate`, which compares two states of something by turns, and `bisect`, which finds the bad commit."""

import shlex
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from optigpu.cli.measuring import Stop, ended_when_stopped
from optigpu.cli.output import echo
from optigpu.cli.remote import ApiKey, connect
from optigpu.vocabulary import Better, OptiGPUError, SpecError

if TYPE_CHECKING:
    from typer._click import Context

    from optigpu.client import Client
    from optigpu.documents.gates import GateOutcome
    from optigpu.gate.turns import Rules, Side

ERROR = 3
"""The exit status of every error of these commands: 1 and 2 are verdicts."""
USAGE = 2
STOPPED = "Stopped, and nothing was decided."
LARGEST_LIMIT = 0.5
SHOWN_GATES = 20


class GateCommand(TyperCommand):
    """A command whose exit status is ERROR for every mistake and failure, since 1 and 2 are verdicts."""

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "exit_code", None) == USAGE:
                vars(error)["exit_code"] = ERROR
            raise

    def invoke(self, ctx: "Context") -> object:
        try:
            return super().invoke(ctx)
        except (OptiGPUError, typer.Exit):
            raise
        except Exception:
            traceback.print_exc()
            raise typer.Exit(ERROR) from None


Text = str | None
File = Path | None
Command = Annotated[Text, typer.Option(help="What the shell runs in each state.")]
METRIC = """The number that the command prints on stdout: `NAME: 12.3`, `12.3 NAME`, the key of a JSON object
(`results.0.value`), or a line that is a number alone. Default: the seconds that the command takes."""
MetricName = Annotated[Text, typer.Option("--metric", help=METRIC)]
DIRECTION = "Which direction of the metric is better. Default: by its name, such as tokens/s or ms."
HigherIsBetter = Annotated[bool | None, typer.Option("--higher-is-better/--lower-is-better", help=DIRECTION)]
WorseThan = Annotated[str, typer.Option(metavar="PERCENT", help="The largest loss to accept.")]
Folder = Annotated[Path, typer.Option(metavar="FOLDER", help="A folder of the git repository.")]
SETUP = """Run once in each state before it is measured, such as a build, for 30 minutes at most. Programs of a `.venv`
that it makes come first on the PATH."""
Setup = Annotated[Text, typer.Option(help=SETUP)]
Minutes = Annotated[float, typer.Option(help="The most minutes of measuring, beside --setup.", min=0.01)]
Seed = Annotated[int, typer.Option(help="Draws which state is first in each pair.", min=0)]


def gate(
    base: Annotated[Text, typer.Option(metavar="REV", help="The git revision to compare with.")] = None,
    head: Annotated[Text, typer.Option(metavar="REV", help="The one to judge. Default: HEAD.")] = None,
    base_wheel: Annotated[File, typer.Option(help="A wheel instead, installed with what it needs.")] = None,
    head_wheel: Annotated[File, typer.Option(help="The wheel to judge.")] = None,
    base_command: Annotated[Text, typer.Option(help="A command instead, run as it is.")] = None,
    head_command: Annotated[Text, typer.Option(help="The command to judge.")] = None,
    command: Command = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = None,
    worse_than: WorseThan = "3%",
    minutes: Minutes = 5.0,
    repository: Folder = Path(),
    setup: Setup = None,
    seed: Seed = 0,
    json_: Annotated[File, typer.Option("--json", help="Also write the outcome into this file.")] = None,
    markdown: Annotated[File, typer.Option(help="Also write the comment into this file.")] = None,
    url: Annotated[Text, typer.Option(help="A service that keeps the outcome in a series.")] = None,
    api_key: ApiKey = None,
    series: Annotated[
        Text, typer.Option(help="The series' name there. Default: the command and the metric.")
    ] = None,
) -> None:
    """Say whether one state of something is worse than another: two revisions, wheels or commands, run by turns.

    It prints a comment in Markdown. Exit status: 0 no worse than the limit, 1 worse, 2 it cannot be said in the time,
    3 any error, 130 interrupted.
    """
    from optigpu.documents.gates import LONGEST_SERIES
    from optigpu.gate.comment import comment
    from optigpu.gate.turns import compare
    from optigpu.report.formats import console
    from optigpu.report.progress import ShareProgress

    rules = _rules(metric, higher_is_better, worse_than, minutes, seed)
    named = {
        "": (base, head or (base and "HEAD")),
        "-wheel": (base_wheel and str(base_wheel), head_wheel and str(head_wheel)),
        "-command": (base_command, head_command),
    }
    asked = [(kind, *names) for kind, names in named.items() if names != (None, None)]
    if len(asked) != 1 or not all(asked[0][1:]):
        raise SpecError(
            "Name both states, in one way: --base REV and --head REV, --base-wheel and --head-wheel, or --base-command "
            "and --head-command."
        )
    ((kind, *names),) = asked
    service = connect(url, api_key) if url else None
    with ended_when_stopped(STOPPED) as stop, ShareProgress(console(stderr=True)) as progress:
        progress.show("building")
        with _sides(kind, [name or "" for name in names], command, repository, setup, stop) as sides:
            outcome = compare(*sides, rules, stop, lambda share: progress.show("pairs of runs", share))
    flags = {f"--base{kind}": sides[0].name, f"--head{kind}": sides[1].name, "--command": command}
    flags |= {
        "--metric": metric,
        "--setup": setup,
        "--repository": str(repository),
        "--worse-than": worse_than,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    words += [f"--{rules.wanted.better}-is-better", "--minutes", f"{minutes:g}", "--seed", str(seed)]
    outcome = outcome.model_copy(update={"repeat": shlex.join(["optigpu", "gate", *words])})
    for path, text in ((json_, outcome.model_dump_json(indent=2) + "\n"), (markdown, comment(outcome))):
        try:
            if path is not None:
                path.write_text(text)
        except OSError as error:
            raise OptiGPUError(f"{path} cannot be written: {error.strerror}; name another file.") from None
    echo(comment(outcome), nl=False)
    if service is not None:
        _keep(
            service,
            series or f"{command or head_command or head_wheel}, {outcome.metric}"[:LONGEST_SERIES],
            outcome,
        )
    raise typer.Exit(outcome.exit_status)


def _keep(service: "Client", series: str, outcome: "GateOutcome") -> None:
    """A service that fails changes no verdict: it is told on stderr."""
    try:
        with service:
            kept = service.add_gate(series, outcome)
            known = service.gates(series, limit=SHOWN_GATES).gates
    except OptiGPUError as error:
        echo(f"The outcome was not kept: {error}", err=True)
        return
    verdicts = Counter(each.outcome.verdict.value for each in known)
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
    echo(
        f"Kept as gate {kept.id} of the series {series!r}, whose last {len(known)} were: {counted}.", err=True
    )


def bisect(
    good: Annotated[str, typer.Option(metavar="REV", help="A revision before the loss.")],
    bad: Annotated[str, typer.Option(metavar="REV", help="A later one with the loss.")] = "HEAD",
    command: Command = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = None,
    worse_than: WorseThan = "3%",
    minutes: Minutes = 5.0,
    repository: Folder = Path(),
    setup: Setup = None,
    seed: Seed = 0,
) -> None:
    """Find the commit that made something worse: by halves between a good and a bad revision, each by a gate.

    --minutes bounds each of its comparisons. Exit status: 0 found, 1 the bad revision is no worse than the good one,
    2 it cannot be said, 3 any error, 130 interrupted.
    """
    from optigpu.gate.bisect import Search
    from optigpu.gate.comment import found_text
    from optigpu.gate.states import worktrees

    rules, text = _rules(metric, higher_is_better, worse_than, minutes, seed), _given(command)
    with ended_when_stopped(STOPPED) as stop, worktrees(repository, setup, stop) as project:
        commits = project.between(project.commit(good), project.commit(bad))
        echo(f"{len(commits) - 1} commits to search.", err=True)
        found = Search(project, commits, text, rules, stop, lambda line: echo(line, err=True)).run()
    echo(found_text(found))
    raise typer.Exit(found.exit_status)


@contextmanager
def _sides(
    kind: str, names: list[str], command: Text, folder: Path, setup: Text, stop: Stop
) -> "Iterator[tuple[Side, Side]]":
    from optigpu.gate.states import wheels, worktrees
    from optigpu.gate.turns import Side

    base, head = names
    if kind == "-command":
        if command is not None or setup is not None:
            raise SpecError(
                "--base-command and --head-command are run as they are: leave out --command and --setup."
            )
        yield Side(base, base, base, folder), Side(head, head, head, folder)
    elif kind == "-wheel":
        with wheels((Path(base), Path(head)), _given(command), folder, setup, stop) as sides:
            yield sides
    else:
        text = _given(command)
        with worktrees(folder, setup, stop) as project:
            commits = project.commit(base), project.commit(head)
            if head == "HEAD" and project.has_changes():
                echo("Changes that are not committed are not measured: --head is the commit HEAD.", err=True)
            ours, theirs = (
                project.side(f"{name} {commit.shown}", commit, text)
                for name, commit in zip(names, commits, strict=True)
            )
            yield ours, theirs


def _given(command: Text) -> str:
    if command is None or not command.strip():
        raise SpecError("Say with --command what is run in each state.")
    return command


def _rules(metric: Text, higher: bool | None, worse_than: str, minutes: float, seed: int) -> "Rules":
    from optigpu.gate.figures import wanted
    from optigpu.gate.turns import Rules

    number, sign, rest = worse_than.strip().partition("%")
    try:
        limit = float(number) / 100
    except ValueError:
        limit = 0.0
    if not sign or rest or not 0 < limit <= LARGEST_LIMIT:
        raise SpecError(
            f"--worse-than {worse_than}: write a percentage up to {LARGEST_LIMIT:.0%}, such as 3%."
        )
    better = None if higher is None else Better.HIGHER if higher else Better.LOWER
    return Rules(wanted(metric, better), limit, 60 * minutes, seed)
