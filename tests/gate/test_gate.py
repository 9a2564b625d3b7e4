"""`optigpu gate` and `bisect` by the command: verdicts, exit statuses, errors, and what stays behind."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from optigpu.cli import main
from optigpu.gate.figures import figure_in
from tests.service.serving import serving

pytestmark = pytest.mark.slow
RATE = ("--metric", "tokens/s")
PRINT = """
import random, sys
value, noise = map(float, sys.argv[1:])
print(f"{value * random.lognormvariate(0, noise):.4f} tokens/s")
"""
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(folder: Path, script: str, subject: str) -> str:
    """A commit of the project, whose command is `sh speed`."""
    (folder / "speed").write_text(script + "\n")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(folder, "rev-parse", "HEAD")


def is_tidy(folder: Path) -> bool:
    """Whether only the checkout itself is left of its worktrees."""
    return git(folder, "worktree", "list").count("\n") == 0


def prints(value: float, noise: float = 0.005) -> str:
    return f"{sys.executable} -S -c {shlex.quote(PRINT)} {value} {noise}"


def of_commands(optigpu: Optigpu, base: str, head: str, *more: str, minutes: str = "1") -> Ran:
    return optigpu("gate", "--base-command", base, "--head-command", head, "--minutes", minutes, *more)


def gone(pid: int) -> bool:
    """Whether the process ends within a minute."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("value", "status", "verdict"),
    [(100, 0, "no worse"), (105, 0, "no worse"), (90, 1, "worse"), (95, 1, "worse")],
)
def test_a_planted_change_is_found_and_none_is_not(
    optigpu: Optigpu, tmp_path: Path, value: float, status: int, verdict: str
) -> None:
    written, text = tmp_path / "gate.json", tmp_path / "gate.md"
    files = ("--json", str(written), "--markdown", str(text))
    ran = of_commands(optigpu, prints(100), prints(value), *RATE, *files)
    report = json.loads(written.read_text())
    assert (ran.status, report["verdict"], report["exit_status"]) == (status, verdict, status)
    assert report["loss_ci"][0] <= report["loss"] <= report["loss_ci"][1]
    assert abs(report["loss"] - (1 - value / 100)) < 0.01
    assert report["ratio"] == pytest.approx(1 - report["loss"])
    assert ran.out == text.read_text()
    assert ran.out.startswith(f"### Gate: {verdict}. tokens/s")
    assert f"**{report['smallest_loss_found']:.1%}**" in ran.out
    assert report["repeat"] in ran.out


def test_less_is_better_where_the_name_or_the_flag_says_so(optigpu: Optigpu) -> None:
    slower = ("echo 100 ms", "echo 110 ms", "--metric", "ms")
    assert of_commands(optigpu, *slower).status == 1
    assert of_commands(optigpu, *slower, "--higher-is-better").status == 0
    unknown = of_commands(optigpu, "echo 100 wugs", "echo 110 wugs", "--metric", "wugs")
    assert unknown.status == 3
    assert "--higher-is-better or --lower-is-better" in unknown.err
    assert of_commands(optigpu, "sleep 0.02", "sleep 0.3").status == 1, "without a metric it is the time"


def test_too_few_pairs_decide_nothing_and_say_how_to_go_on(optigpu: Optigpu) -> None:
    commands = ("sleep 1.2; echo 1 tokens/s", "sleep 1.2; echo 2 tokens/s")
    ran = of_commands(optigpu, *commands, *RATE, minutes="0.2")
    assert ran.status == 2
    assert ran.out.startswith("### Gate: cannot say")
    assert "finding a loss needs at least 9: make the command shorter, or give --minutes" in ran.out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("true", "printed no number for tokens/s on stdout"),
        ("echo 3 tokens/s; echo 4 tokens/s", "printed 2 numbers for tokens/s (3, 4)"),
        ("echo 3; echo 4", "printed 2 numbers for tokens/s (3, 4)"),
        ("echo tokens/s: nan", "printed nan for tokens/s; a ratio needs a number above 0"),
        ("echo tokens/s: 0", "printed 0 for tokens/s; a ratio needs a number above 0"),
        ("echo tokens/s: -3.5", "printed -3.5 for tokens/s; a ratio needs a number above 0"),
        ('echo \'{"tokens/s": "fast"}\'', "printed no number for tokens/s on stdout"),
        ("echo oh no >&2; exit 7", "ended with exit status 7; mend it first. It printed at last:\n  oh no"),
    ],
)
def test_a_command_without_a_figure_is_an_error(optigpu: Optigpu, command: str, words: str) -> None:
    ran = of_commands(optigpu, "echo 5 tokens/s", command, *RATE)
    assert (ran.status, ran.out) == (3, "")
    assert f"Error: The command of {command}" in ran.err
    assert words in ran.err


@pytest.mark.parametrize(
    "output",
    ["tokens/s: 1,234.5", "1234.5 tokens/s", "done\n| tokens/s | 1234.5 |", '{"a": [{"tokens/s": 1234.5}]}',
     "1234.5", "prefill 900 prompt_tokens/s\ndecode 1234.5 tokens/s in 3 s", '"tokens/s": 1.2345e3,'],
)  # fmt: skip
def test_the_forms_of_a_figure(output: str) -> None:
    assert figure_in(output, "a.0.tokens/s" if output.startswith("{") else "tokens/s") == 1234.5


def test_a_command_that_hangs_is_killed_with_its_children(optigpu: Optigpu, tmp_path: Path) -> None:
    child = tmp_path / "child"
    waits = f"sleep 600 & echo $! > {child}; echo waiting; wait"
    ran = of_commands(optigpu, "echo 5 tokens/s", waits, *RATE, minutes="0.2")
    assert ran.status == 3
    assert "did not end within 3 s, a quarter of the time, and was killed" in ran.err
    assert gone(int(child.read_text()))


@pytest.mark.parametrize(
    "arguments",
    ["", "--base main --base-wheel x.whl", "--base-command true", "--wrong", "--base HEAD",
     "--base-command true --head-command true --worse-than 3", "--base no-such-revision --command true",
     "--base-command true --head-command true --minutes x", "--base-wheel no --head-wheel no --command true",
     "--base-command true --head-command true --command true",
     "--base-command true --head-command true --url ftp://nowhere"],
)  # fmt: skip
def test_a_wrong_request_is_never_a_verdict(optigpu: Optigpu, arguments: str) -> None:
    ran = optigpu("gate", *arguments.split())
    assert ran.status == 3
    assert "Error" in ran.err


def test_two_commits_in_worktrees_of_their_own(optigpu: Optigpu, project: Path) -> None:
    base = commit(project, "cat built", "slow")
    head = commit(project, "echo tokens/s: 90", "slower")
    (project / "speed").write_text("echo tokens/s: 1\n")
    more = ("--command", "sh speed", *RATE, "--minutes", "1", "--repository", str(project))
    ran = optigpu("gate", "--base", "HEAD~1", "--setup", "echo tokens/s: 100 > built", *more)
    assert ran.status == 1
    assert f"HEAD~1 {base[:10]} (slow)" in ran.out
    assert f"--base {base} --head {head}" in ran.out
    assert "Changes that are not committed are not measured" in ran.err
    assert not (project / "built").exists()
    broken = optigpu("gate", "--base", "HEAD~1", "--setup", "echo no compiler >&2; exit 4", *more)
    assert broken.status == 3
    assert "does not build: --setup ended with exit status 4; nothing was measured." in broken.err
    assert "no compiler" in broken.err
    assert is_tidy(project)


def test_a_service_keeps_the_outcomes_as_a_series(optigpu: Optigpu, tmp_path: Path) -> None:
    commands = ("--base-command", "echo 100", "--head-command", "echo 90")
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}") as served:
        for count, more in ((1, ()), (1, ("--series", "other")), (2, ())):
            ran = optigpu("gate", *commands, *RATE, "--minutes", "1", "--url", served.url, *more)
            assert ran.status == 1
            assert f"whose last {count} were: {count} worse" in ran.err
        answer = served.client.get("/v1/gates?series=echo 90, tokens/s").json()
        page = served.client.get("/gates").text
    assert [(each["outcome"]["verdict"], each["told"]) for each in answer["gates"]] == [("worse", True)] * 2
    assert page.count("+10.0% to +10.0%") == 3
    lost = optigpu("gate", *commands, *RATE, "--minutes", "1", "--url", served.url)
    assert lost.status == 1
    assert "The outcome was not kept" in lost.err


def test_two_wheels_hide_the_sources_beside_the_script(
    optigpu: Optigpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "speedy.py").write_text("SPEED = 1")
    wheels = []
    for version, speed in ((1, 100), (2, 80)):
        wheels.append(tmp_path / f"speedy-{version}-py3-none-any.whl")
        with zipfile.ZipFile(wheels[-1], "w") as file:
            meta = f"Metadata-Version: 2.1\nName: speedy\nVersion: {version}\n"
            file.writestr("speedy.py", f"SPEED = {speed}")
            file.writestr(f"speedy-{version}.dist-info/METADATA", meta)
            file.writestr(f"speedy-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            file.writestr(f"speedy-{version}.dist-info/RECORD", "")
    files = ("--base-wheel", str(wheels[0]), "--head-wheel", str(wheels[1]), "--minutes", "0.5", *RATE)
    ran = optigpu("gate", *files, "--command", "python -c 'import speedy; print(speedy.SPEED)'")
    assert ran.status == 1
    assert "tokens/s 20.0% worse" in ran.out


def test_a_stopped_gate_leaves_no_worktree_and_no_process(project: Path) -> None:
    commit(project, f"echo $$ > {project / 'pid'}; sleep 600", "waits")
    command = [sys.executable, "-m", "optigpu", "gate", "--base", "main", "--command", "sh speed"]
    command += ["--minutes", "60", "--repository", str(project)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ)
    while not (project / "pid").exists() or not (project / "pid").read_text().strip():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Stopped, and nothing was decided." in err
    assert gone(int((project / "pid").read_text()))
    assert is_tidy(project)


def test_bisect_finds_the_commit_and_leaves_out_what_does_not_run(optigpu: Optigpu, project: Path) -> None:
    for number, value in enumerate((100, 100, 100, 100, 93, 93, 93)):
        commit(project, "exit 1" if number == 3 else f"echo {value} tokens/s", f"change {number}")
    more = ("--command", "sh speed", *RATE, "--minutes", "1", "--repository", str(project))
    ran = optigpu("bisect", "--good", "HEAD~6", *more)
    assert ran.status == 2
    assert "(change 3) is left out" in ran.err
    assert [line.split("(")[1] for line in ran.out.splitlines()[1:]] == ["change 3)", "change 4)"]
    same = optigpu("bisect", "--good", "HEAD~2", *more)
    assert same.status == 1
    assert "is no worse than" in same.out
    bad = commit(project, prints(85, 0.002), "the bad one")
    commit(project, prints(85, 0.002), "innocent")
    found = optigpu("bisect", "--good", "HEAD~4", *more)
    assert found.status == 0
    assert found.out.startswith(f"The first bad commit is {bad[:10]} (the bad one)")
    assert optigpu("bisect", "--good", "HEAD", "--bad", "HEAD~1", *more).status == 3
    assert is_tidy(project)
