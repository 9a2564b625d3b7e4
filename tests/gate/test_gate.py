"""`optigpu gate` and `bisect` by the command: verdicts, exit statuses, errors, and what stays behind."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from optigpu.cli import main

pytestmark = pytest.mark.slow

PRINT = (
    "import random, sys, time; value, noise = map(float, sys.argv[1:]); "
    "print(f'{value * random.lognormvariate(0, noise):.4f} tokens/s')"
)
"""Prints a figure that does not depend on how fast the machine is."""


class Ran(NamedTuple):
    status: int
    out: str
    err: str


Optigpu = Callable[..., Ran]


@pytest.fixture
def optigpu(capfd: pytest.CaptureFixture[str]) -> Optigpu:
    def command(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        return Ran(int(exit_.value.code or 0), *capfd.readouterr())

    return command


def prints(value: float, noise: float = 0.005) -> str:
    return f"{sys.executable} -S -c {shlex.quote(PRINT)} {value} {noise}"


def git(folder: Path, *arguments: str) -> str:
    who = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=os.environ | who, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose command `sh speed` prints a figure; `commit` adds commits."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def commit(folder: Path, text: str, subject: str) -> str:
    (folder / "speed").write_text(text + "\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(folder, "rev-parse", "HEAD")


def of_commands(optigpu: Optigpu, base: str, head: str, *more: str, minutes: str = "0.2") -> Ran:
    return optigpu("gate", "--base-command", base, "--head-command", head, "--minutes", minutes, *more)


RATE = ("--metric", "tokens/s")


@pytest.mark.parametrize(
    ("value", "status", "verdict"),
    [(100, 0, "no worse"), (105, 0, "no worse"), (90, 1, "worse"), (95, 1, "worse")],
)
def test_a_planted_change_is_found_and_none_is_not(
    optigpu: Optigpu, tmp_path: Path, value: float, status: int, verdict: str
) -> None:
    written, text = tmp_path / "gate.json", tmp_path / "gate.md"
    ran = of_commands(
        optigpu,
        prints(100),
        prints(value),
        *RATE,
        "--json",
        str(written),
        "--markdown",
        str(text),
        minutes="1",
    )
    assert ran.status == status
    report = json.loads(written.read_text())
    assert (report["verdict"], report["exit_status"]) == (verdict, status)
    low, high = report["loss_ci"]
    assert low <= report["loss"] <= high
    assert abs(report["loss"] - (1 - value / 100)) < 0.01
    assert 0.03 < report["smallest_loss_found"] < 0.06
    assert ran.out == text.read_text()
    assert ran.out.startswith(f"### Gate: {verdict}. tokens/s")
    assert f"**{report['smallest_loss_found']:.1%}**" in ran.out
    assert report["repeat"] in ran.out


def test_less_is_better_where_the_name_or_the_flag_says_so(optigpu: Optigpu) -> None:
    slower = ("echo 100 ms", "echo 110 ms")
    assert of_commands(optigpu, *slower, "--metric", "ms").status == 1
    assert of_commands(optigpu, *slower, "--metric", "ms", "--higher-is-better").status == 0
    unknown = of_commands(optigpu, "echo 100 wugs", "echo 110 wugs", "--metric", "wugs")
    assert unknown.status == 3
    assert "--higher-is-better or --lower-is-better" in unknown.err


def test_a_command_that_sleeps_longer_is_worse_by_its_time(optigpu: Optigpu) -> None:
    assert of_commands(optigpu, "sleep 0.02", "sleep 0.3").status == 1


def test_too_few_pairs_decide_nothing_and_say_how_to_go_on(optigpu: Optigpu) -> None:
    ran = of_commands(
        optigpu, "sleep 0.5; echo 1 tokens/s", "sleep 0.5; echo 2 tokens/s", *RATE, minutes="0.07"
    )
    assert ran.status == 2
    assert ran.out.startswith("### Gate: cannot say")
    assert "finding a loss needs at least 9: make the command shorter, or give --minutes" in ran.out


def test_noise_that_hides_the_limit_cannot_say(optigpu: Optigpu) -> None:
    ran = of_commands(optigpu, prints(100, 1.0), prints(97, 1.0), *RATE, minutes="0.05")
    assert ran.status == 2


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("true", "printed no number for tokens/s on stdout"),
        ("echo hello", "printed no number for tokens/s on stdout"),
        ("echo 3 tokens/s; echo 4 tokens/s", "printed 2 numbers for tokens/s (3, 4)"),
        ("echo 3; echo 4", "printed 2 numbers for tokens/s (3, 4)"),
        ("echo tokens/s: nan", "printed nan for tokens/s; a ratio needs a number above 0"),
        ("echo tokens/s: 0", "printed 0 for tokens/s; a ratio needs a number above 0"),
        ("echo tokens/s: -3.5", "printed -3.5 for tokens/s; a ratio needs a number above 0"),
        ("echo tokens/s: inf", "printed inf for tokens/s; a ratio needs a number above 0"),
        ('echo \'{"tokens/s": "fast"}\'', "printed no number for tokens/s on stdout"),
        ("echo oh no >&2; exit 7", "ended with exit status 7; mend it first. It printed at last:\n  oh no"),
        ("no-such-program", "ended with exit status 127"),
    ],
)
def test_a_command_without_a_figure_is_an_error(optigpu: Optigpu, command: str, words: str) -> None:
    ran = of_commands(optigpu, "echo 5 tokens/s", command, *RATE)
    assert ran.status == 3
    assert f"Error: The command of {command}" in ran.err
    assert words in ran.err
    assert ran.out == ""


@pytest.mark.parametrize(
    "output",
    ["tokens/s: 1,234.5", "1234.5 tokens/s", "done\n| tokens/s | 1234.5 |", '{"a": {"tokens/s": 1234.5}}', "1234.5",
     "prefill 900 prompt_tokens/s\ndecode 1234.5 tokens/s in 3 s", '"tokens/s": 1.2345e3,'],
)  # fmt: skip
def test_the_forms_of_a_figure(output: str) -> None:
    from optigpu.gate.figures import figure_in

    assert figure_in(output, "a.tokens/s" if output.startswith("{") else "tokens/s") == 1234.5


def test_a_command_that_hangs_is_killed_with_its_children(optigpu: Optigpu, tmp_path: Path) -> None:
    child = tmp_path / "child"
    ran = of_commands(
        optigpu,
        "echo 5 tokens/s",
        f"sleep 600 & echo $! > {child}; echo waiting; wait",
        *RATE,
        minutes="0.05",
    )
    assert ran.status == 3
    assert "did not end within 0.75 s, a quarter of the time, and was killed" in ran.err
    assert "waiting" in ran.err
    assert gone(int(child.read_text()))


def gone(pid: int) -> bool:
    """Whether the process ends within a minute."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    "arguments",
    [(), ("--base", "main", "--base-wheel", "x.whl"), ("--head", "main"), ("--base-command", "true"), ("--wrong",),
     ("--base-command", "true", "--head-command", "true", "--worse-than", "3"),
     ("--base-command", "true", "--head-command", "true", "--worse-than", "0%"),
     ("--base-command", "true", "--head-command", "true", "--minutes", "x"),
     ("--base-command", "true", "--head-command", "true", "--command", "true"),
     ("--base-wheel", "no.whl", "--head-wheel", "no.whl", "--command", "true"),
     ("--base", "no-such-revision", "--command", "true"), ("--base", "HEAD")],
)  # fmt: skip
def test_a_wrong_request_is_never_a_verdict(optigpu: Optigpu, arguments: tuple[str, ...]) -> None:
    ran = optigpu("gate", *arguments)
    assert ran.status == 3
    assert "Error" in ran.err


def test_two_commits_in_worktrees_of_their_own(optigpu: Optigpu, project: Path) -> None:
    commit(project, "cat built", "slow")
    base = git(project, "rev-parse", "HEAD")
    head = commit(project, "echo tokens/s: 90", "slower")
    (project / "speed").write_text("echo tokens/s: 1\n")
    ran = optigpu(
        "gate", "--base", "HEAD~1", "--command", "sh speed", "--setup", "echo tokens/s: 100 > built", *RATE,
        "--minutes", "0.2", "--repository", str(project),
    )  # fmt: skip
    assert ran.status == 1
    assert f"HEAD~1 {base[:10]} (slow)" in ran.out
    assert f"--base {base} --head {head}" in ran.out
    assert "Changes that are not committed are not measured" in ran.err
    assert git(project, "worktree", "list").count("\n") == 0
    assert not (project / "built").exists()


def test_a_base_that_does_not_build_is_an_error(optigpu: Optigpu, project: Path) -> None:
    commit(project, "echo tokens/s: 100", "broken")
    ran = optigpu(
        "gate", "--base", "main", "--command", "sh speed", *RATE, "--repository", str(project),
        "--setup", "echo compiling; echo no compiler >&2; exit 4",
    )  # fmt: skip
    assert ran.status == 3
    assert "does not build: --setup ended with exit status 4; nothing was measured." in ran.err
    assert "no compiler" in ran.err
    assert git(project, "worktree", "list").count("\n") == 0


def test_a_stopped_gate_removes_its_worktrees_and_processes(project: Path) -> None:
    commit(project, f"echo $$ > {project / 'pid'}; sleep 600", "waits")
    command = [
        sys.executable,
        "-m",
        "optigpu",
        "gate",
        "--base",
        "main",
        "--command",
        "sh speed",
        "--minutes",
        "60",
    ]
    process = subprocess.Popen([*command, "--repository", str(project)], stderr=subprocess.PIPE, text=True)
    while not (project / "pid").exists() or not (project / "pid").read_text().strip():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Stopped, and nothing was decided." in err
    assert gone(int((project / "pid").read_text()))
    assert git(project, "worktree", "list").count("\n") == 0


def test_bisect_finds_the_commit_and_leaves_out_one_that_does_not_build(
    optigpu: Optigpu, project: Path
) -> None:
    bad = 5
    for number in range(9):
        broken = "exit 1; " if number == 4 else ""
        commit(project, f"{broken}{prints(100 if number < bad else 93, 0.002)}", f"change {number}")
    arguments = ("--command", "sh speed", *RATE, "--minutes", "0.5", "--repository", str(project))
    ran = optigpu("bisect", "--good", "HEAD~8", "--bad", "HEAD", *arguments)
    # Commit 4, which does not run, lies between the last that is good and the first that is bad.
    assert ran.status == 2
    assert "(change 4) is left out" in ran.err
    assert "One of these commits is the first bad one" in ran.out
    assert [line.split("(")[1] for line in ran.out.splitlines()[1:]] == ["change 4)", "change 5)"]
    ran = optigpu("bisect", "--good", "HEAD~3", "--bad", "HEAD", *arguments)
    assert ran.status == 1
    assert "is no worse than" in ran.out
    commit(project, prints(85, 0.002), "the bad one")
    commit(project, prints(85, 0.002), "innocent")
    ran = optigpu("bisect", "--good", "HEAD~5", *arguments)
    assert ran.status == 0
    assert f"The first bad commit is {git(project, 'rev-parse', 'HEAD~1')[:10]} (the bad one)" in ran.out
    backwards = optigpu("bisect", "--good", "HEAD", "--bad", "HEAD~1", *arguments)
    assert backwards.status == 3
    assert git(project, "worktree", "list").count("\n") == 0
