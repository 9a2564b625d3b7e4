"""`python -m tests`: the tests side by side, a process for each CPU, then those on a GPU one after the other.

`python -m tests --quick` runs what a developer waits for after each change, `python -m tests --all` also the tests
that are marked `long`. Other arguments go to pytest. Which tests are quick tests/conftest.py says. Plain `pytest` runs
everything one after the other.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from optigpu.hardware.cpu import allowed_cpus
from tests.conftest import QUICK, QUICK_PROFILE, gpu_count

NOTHING_FOUND = 5
"""pytest's exit status when no test was selected."""
QUIETLY = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""torch's threads would wait for each other, and a thread that waits by spinning takes the CPU from one that works."""
ROOT = Path(__file__).resolve().parent.parent
TESTS_OF = {
    "optigpu/edge/": "tests/edge",
    "esp32_agent/": "tests/edge",
    "optigpu/store/": "tests/service",
    "optigpu/": "tests/engine",
    "api/": "tests/service",
    "worker/": "tests/service",
    "migrations/": "tests/service",
    "deploy/": "tests/deploy",
    "docs/": "tests/unit",
}
"""The folder of the tests of what begins so; the first that matches counts."""
NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Containers often set it. Each of the hundreds of processes that tests start would compile what it imports anew."""


def main(arguments: Sequence[str]) -> int:
    """Runs both parts, the second even after a failure in the first; the status is pytest's of the worse one."""
    # A shell that runs this in the background has it ignore Ctrl-C, and every process that tests send it to would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if arguments[:1] == ["--quick"]:
        return run(
            [*side_by_side("quick"), "--hypothesis-profile", QUICK_PROFILE, *quick_places(arguments[1:])]
        )
    if arguments[:1] == ["--all"]:
        return run_both("", arguments[1:])
    status = run_both(" and not long", arguments)
    if due := folders_due(changed_files()):
        print(f"Changed, and with long tests that did not run (`make test-all ARGS=...`): {' '.join(due)}")
    return status


def quick_places(arguments: Sequence[str]) -> list[str]:
    """The arguments; where they name no place, all others than the folders of the quick tests are not imported.

    The folders are not named: the process that hands out the tests would import what theirs need, torch, by itself.
    """
    named = any((ROOT / each.partition("::")[0]).exists() for each in arguments)
    others = [path for path in (ROOT / "tests").iterdir() if path.is_dir() and f"{path.name}/" not in QUICK]
    return [*arguments, *([] if named else (f"--ignore={path.relative_to(ROOT)}" for path in others))]


def run_both(selection: str, arguments: Sequence[str]) -> int:
    """The tests that run side by side, then the others, of which each needs a GPU."""
    statuses = [run([*side_by_side(f"together{selection}"), *arguments])]
    if gpu_count():
        statuses.append(run(["-m", f"not together{selection}", *arguments]))
    found = [status for status in statuses if status != NOTHING_FOUND]
    return max(found, default=NOTHING_FOUND)


def changed_files() -> list[str]:
    """The files that differ from the last tagged version; before the first tag all of them, without git none."""
    tag = git("describe", "--tags", "--abbrev=0")
    return git("diff", "--name-only", *tag) if tag else git("ls-files")


def folders_due(changed: Iterable[str]) -> list[str]:
    """The folders of tests that hold long ones, and of which something that they test has changed."""
    found = {folder for name in changed if (folder := folder_of_tests(name))}
    return sorted(folder for folder in found if any(map(has_long_tests, (ROOT / folder).rglob("test_*.py"))))


def folder_of_tests(name: str) -> str | None:
    """The folder of the tests of a file: of `optigpu/edge/gate.py` it is `tests/edge`."""
    own = re.match(r"tests/[a-z]+(?=/)", name)
    return (
        own[0] if own else next((tests for start, tests in TESTS_OF.items() if name.startswith(start)), None)
    )


def has_long_tests(file: Path) -> bool:
    """Whether it marks a test as long, itself or by tests/breadth.py."""
    text = file.read_text(encoding="utf-8")
    return "mark.long" in text or "tests.breadth" in text


def git(*arguments: str) -> list[str]:
    """The lines that git prints; none where it fails, or where there is no git."""
    with suppress(FileNotFoundError):
        told = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return told.stdout.splitlines() if told.returncode == 0 else []
    return []


def side_by_side(marker: str) -> list[str]:
    """pytest's arguments for the tests of a marker, a process for each CPU.

    The files keep their order: sorted by their number of tests, those with few and long ones would come last. A process
    that dies ends the run, which then names its test: with another one in its place pytest-xdist 3.8 hands out the
    files that the dead one had finished, until both wait for more and the run never ends.
    """
    workers = str(len(allowed_cpus()) or os.cpu_count() or 1)
    return [
        *("-m", marker, "-n", workers, "--dist", "loadfile", "--no-loadscope-reorder"),
        *("--max-worker-restart", "0"),
    ]


def run(arguments: Sequence[str]) -> int:
    """One run of pytest."""
    variables = {name: value for name, value in os.environ.items() if name != NO_BYTECODE} | QUIETLY
    return subprocess.run([sys.executable, "-m", "pytest", *arguments], env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
