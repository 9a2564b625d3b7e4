"""The commands `gate`, which compares two states of something by turns, and `bisect`, which finds the bad commit."""

import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperCommand

from optigpu.cli.measuring import Stop, ended_when_stopped
from optigpu.cli.output import echo
from optigpu.vocabulary import Better, OptiGPUError, SpecError

if TYPE_CHECKING:
    from typer._click import Context

    from optigpu.gate.states import Build
    from optigpu.gate.turns import Rules, Side

ERROR = 3
"""The exit status of every error of these commands: 1 and 2 are verdicts."""
USAGE = 2
STOPPED = "Stopped, and nothing was decided."
LARGEST_LIMIT = 0.5


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


CommandText = Annotated[
    str | None, typer.Option("--command", help="What is run in each state, by the shell.", show_default=False)
]
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="The number that the command prints on stdout: `NAME: 12.3`, `12.3 NAME`, the key of a JSON object "
        "(`results.0.value`), or a line that is a number alone. Default: the seconds that the command takes.",
        show_default=False,
    ),
]
HigherIsBetter = Annotated[
    bool | None,
    typer.Option(
        "--higher-is-better/--lower-is-better",
        help="Which direction of the metric is better. Default: by its name, such as tokens/s or ms.",
        show_default=False,
    ),
]
WorseThan = Annotated[str, typer.Option(metavar="PERCENT", help="The largest loss to accept.")]
Folder = Annotated[Path, typer.Option(metavar="FOLDER", help="A folder of the git repository.")]
Setup = Annotated[
    str | None,
    typer.Option(
        help="Run once in each state before it is measured, such as a build. Programs of a `.venv` that it makes come "
        "first on the PATH.",
        show_default=False,
    ),
]
SetupMinutes = Annotated[float, typer.Option(help="The most minutes of each --setup.", min=0.01)]
Minutes = Annotated[float, typer.Option(help="The most minutes of measuring, beside --setup.", min=0.01)]
Seed = Annotated[int, typer.Option(help="Draws which state is first in each pair.", min=0)]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the outcome as JSON.", show_default=False),
]
Markdown = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the comment into a file.", show_default=False)
]


def gate(
    base: Annotated[
        str | None, typer.Option(metavar="REV", help="The git revision to compare with.", show_default=False)
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="REV", help="The revision to judge. Default: HEAD.", show_default=False),
    ] = None,
    base_wheel: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Instead of --base: a wheel, installed with what it needs."),
    ] = None,
    head_wheel: Annotated[Path | None, typer.Option(metavar="FILE", help="The wheel to judge.")] = None,
    base_command: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Instead of --base: a command, run as it is.")
    ] = None,
    head_command: Annotated[str | None, typer.Option(metavar="TEXT", help="The command to judge.")] = None,
    command: CommandText = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = None,
    worse_than: WorseThan = "3%",
    minutes: Minutes = 5.0,
    repository: Folder = Path(),
    setup: Setup = None,
    setup_minutes: SetupMinutes = 30.0,
    seed: Seed = 0,
    json_: Json = None,
    markdown: Markdown = None,
) -> None:
    """Say whether one state of something is worse than another: two revisions, wheels or commands, run by turns.

    It prints a comment in Markdown. Exit status: 0 no worse than the limit, 1 worse, 2 it cannot be said in the time,
    3 any error, 130 interrupted.
    """
    from optigpu.gate.comment import comment, report_of
    from optigpu.gate.states import Build
    from optigpu.gate.turns import compare
    from optigpu.report.formats import console
    from optigpu.report.progress import ShareProgress

    rules = _rules(metric, higher_is_better, worse_than, minutes, seed)
    build = Build(setup, 60 * setup_minutes)
    if base is None and not any((head, base_wheel, head_wheel, base_command, head_command)):
        raise SpecError("Name what to compare with: --base REV, --base-wheel FILE or --base-command TEXT.")
    named = (
        ("--base", base, "--head", head or (base and "HEAD")),
        ("--base-wheel", base_wheel, "--head-wheel", head_wheel),
        ("--base-command", base_command, "--head-command", head_command),
    )
    given = [each for each in named if each[1] is not None or each[3] is not None]
    if len(given) != 1 or any(value is None for value in given[0][1::2]):
        flags = " and ".join(str(flag) for each in given for flag in each[::2])
        raise SpecError(f"{flags}: name both states, and in one way only.")
    with ended_when_stopped(STOPPED) as stop, ShareProgress(console(stderr=True)) as progress:
        progress.show("building")
        with _sides(given[0], command, repository, build, stop) as sides:
            outcome = compare(*sides, rules, stop, lambda share: progress.show("pairs of runs", share))
    report = report_of(
        outcome, sides, rules, _again(given[0][0::2], sides, command, rules, repository, setup)
    )
    _write(json_, report.model_dump_json(indent=2) + "\n")
    _write(markdown, comment(report))
    echo(comment(report), nl=False)
    raise typer.Exit(report.exit_status)


def bisect(
    good: Annotated[str, typer.Option(metavar="REV", help="A revision that is fast.")],
    bad: Annotated[str, typer.Option(metavar="REV", help="A later revision that is slow.")] = "HEAD",
    command: CommandText = None,
    metric: MetricName = None,
    higher_is_better: HigherIsBetter = None,
    worse_than: WorseThan = "3%",
    minutes: Minutes = 5.0,
    repository: Folder = Path(),
    setup: Setup = None,
    setup_minutes: SetupMinutes = 30.0,
    seed: Seed = 0,
) -> None:
    """Find the commit that made something worse: by halves between a good and a bad revision, each by a gate.

    --minutes bounds each of its comparisons. Exit status: 0 found, 1 the bad revision is no worse than the good one,
    2 it cannot be said, 3 any error, 130 interrupted.
    """
    from optigpu.gate.bisect import Search
    from optigpu.gate.comment import found_text
    from optigpu.gate.states import Build
    from optigpu.gate.states import repository as opened

    rules = _rules(metric, higher_is_better, worse_than, minutes, seed)
    build = Build(setup, 60 * setup_minutes)
    with ended_when_stopped(STOPPED) as stop, opened(repository, build, stop) as project:
        commits = project.between(project.commit(good), project.commit(bad))
        echo(f"{len(commits) - 1} commits to search.", err=True)
        found = Search(project, commits, _text(command), rules, stop, lambda line: echo(line, err=True)).run()
    echo(found_text(found))
    raise typer.Exit(found.exit_status)


Named = tuple[str, str | Path | None, str, str | Path | None]
"""The flags of the two states, each followed by its value."""


@contextmanager
def _sides(
    named: Named, command: str | None, folder: Path, build: "Build", stop: Stop
) -> "Iterator[tuple[Side, Side]]":
    from optigpu.gate.states import repository, wheels
    from optigpu.gate.turns import Side

    kind, base, _, head = map(str, named)
    if kind == "--base-command":
        if command is not None or build.setup is not None:
            raise SpecError(
                "--base-command and --head-command are run as they are: leave out --command and --setup."
            )
        yield Side(base, base, base, folder), Side(head, head, head, folder)
    elif kind == "--base-wheel":
        with wheels((Path(base), Path(head)), _text(command), folder, build, stop) as sides:
            yield sides
    else:
        text = _text(command)
        with repository(folder, build, stop) as project:
            commits = project.commit(base), project.commit(head)
            if head == "HEAD" and project.has_changes():
                echo("Changes that are not committed are not measured: --head is the commit HEAD.", err=True)
            ours, theirs = (
                project.side(f"{name} {commit.shown}", commit, text)
                for name, commit in zip((base, head), commits, strict=True)
            )
            yield ours, theirs


def _text(command: str | None) -> str:
    if command is None or not command.strip():
        raise SpecError("Say with --command what is run in each state.")
    return command


def _rules(metric: str | None, higher: bool | None, worse_than: str, minutes: float, seed: int) -> "Rules":
    from optigpu.gate.figures import wanted
    from optigpu.gate.turns import Rules

    better = None if higher is None else Better.HIGHER if higher else Better.LOWER
    return Rules(wanted(metric, better), _share(worse_than), 60 * minutes, seed)


def _share(text: str) -> float:
    number, sign, rest = text.strip().partition("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = 0.0
    if not sign or rest or not 0 < share <= LARGEST_LIMIT:
        raise SpecError(
            f"--worse-than {text}: write a percentage above 0% and up to {LARGEST_LIMIT:.0%}, such as 3%."
        )
    return share


def _again(
    flags: Sequence[object],
    sides: "tuple[Side, Side]",
    command: str | None,
    rules: "Rules",
    folder: Path,
    setup: str | None,
) -> str:
    """The command that does the same again."""
    words = [str(word) for flag, side in zip(flags, sides, strict=True) for word in (flag, side.name)]
    more = {"--command": command, "--metric": rules.wanted.metric, "--setup": setup}
    words += [word for flag, value in more.items() if value for word in (flag, value)]
    words += ["--higher-is-better" if rules.is_rate else "--lower-is-better", "--repository", str(folder)]
    words += ["--worse-than", f"{100 * rules.worse_than:g}%", "--minutes", f"{rules.time_s / 60:g}"]
    return shlex.join(["optigpu", "gate", *words, "--seed", str(rules.seed)])


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise OptiGPUError(f"{path} cannot be written: {error.strerror}; name another file.") from None
