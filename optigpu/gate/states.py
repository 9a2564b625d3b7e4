"""What is compared: two revisions in worktrees, two wheels in environments, or two commands as they are."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from optigpu.gate.turns import GateError, Side, Stop, quoted, run_bounded
from optigpu.vocabulary import SpecError

SETUP_S = 30 * 60
"""The most seconds of a build."""


@dataclass(frozen=True)
class Commit:
    """A commit by its hash, with the first line of its message."""

    sha: str
    subject: str

    @property
    def shown(self) -> str:
        return f"{self.sha[:10]} ({self.subject})"


class Repository:
    """A git repository, and worktrees of its commits that are removed at the end. Raises SpecError if there is none."""

    def __init__(self, folder: Path, scratch: Path, setup: str | None, stop: Stop) -> None:
        self._folder, self._scratch, self._setup, self._stop = folder, scratch, setup, stop
        self._sides: dict[str, Side] = {}
        self._prefix = self._git("rev-parse", "--show-prefix")

    def commit(self, revision: str) -> Commit:
        """Raises SpecError if there is no such revision."""
        sha = self._git(
            "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}", of=revision
        )
        return Commit(sha, self._git("log", "-1", "--format=%s", sha))

    def between(self, good: Commit, bad: Commit) -> list[Commit]:
        """The commits from `good` to `bad`, both included, along first parents. Raises SpecError if these do not lead
        to `good`."""
        if good == bad:
            raise SpecError(f"The good and the bad revision are the same commit, {good.shown}; name two.")
        listed = self._git("log", "--first-parent", "--format=%H %s", "--reverse", f"{good.sha}..{bad.sha}")
        commits = [good, *(Commit(*line.split(" ", 1)) for line in listed.splitlines())]
        ours = self._git("rev-parse", f"{commits[1].sha}^") if len(commits) > 1 else None
        if ours != good.sha:
            raise SpecError(
                f"{good.shown} is not one of the first parents of {bad.shown}; name a good revision that is."
            )
        return commits

    def has_changes(self) -> bool:
        """Whether files that git knows were changed and not committed."""
        return bool(self._git("status", "--porcelain", "--untracked-files=no"))

    def side(self, label: str, commit: Commit, command: str) -> Side:
        """The commit's worktree, built: one for each commit. Raises GateError if it does not build."""
        if commit.sha not in self._sides:
            tree = self._scratch / commit.sha
            if not tree.exists():
                self._git("worktree", "add", "--detach", "--quiet", str(tree), commit.sha)
            folder = tree / self._prefix
            if not folder.is_dir():
                raise GateError(f"{label} has no folder {self._prefix}; choose a revision that has it.")
            # A build may make `.venv`: its programs come first in what runs afterwards.
            first = {"PATH": f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
            self._sides[commit.sha] = built(
                Side(label, commit.sha, command, folder, first), self._setup, self._stop
            )
        return replace(self._sides[commit.sha], label=label)

    def remove(self) -> None:
        """Removes all worktrees."""
        for tree in self._scratch.iterdir():
            shutil.rmtree(tree, ignore_errors=True)
        self._run("worktree", "prune")

    def _git(self, *arguments: str, of: str | None = None) -> str:
        done = self._run(*arguments)
        if done.returncode == 0:
            return done.stdout.strip()
        if of is not None:
            raise SpecError(f"{self._folder.resolve()} has no revision {of}; fetch it, or name another one.")
        reason = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise SpecError(f"git {arguments[0]} failed in {self._folder.resolve()}: {reason}")

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        # Hooks and the variables of a hook that runs this command belong to the checkout alone.
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        try:
            return subprocess.run(
                ["git", "-c", "core.hooksPath=/dev/null", *arguments], cwd=self._folder, capture_output=True, text=True,
                check=False, env=own, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SpecError(f"git cannot be started in {self._folder}: {error.strerror}.") from None


def built(side: Side, setup: str | None, stop: Stop) -> Side:
    """The side after its build. Raises GateError if that fails or takes too long."""
    if setup is None:
        return side
    ended = run_bounded(replace(side, command=setup), SETUP_S, stop)
    if ended.status:
        how = f"does not build: --setup ended with exit status {ended.status}"
    elif ended.status is None:
        how = f"was not built within {SETUP_S / 60:g} minutes"
    else:
        return side
    raise GateError(f"{side.label} {how}; nothing was measured.{quoted(ended.last)}")


@contextmanager
def worktrees(folder: Path, setup: str | None, stop: Stop) -> Iterator[Repository]:
    """A repository whose worktrees are removed at the end, however that comes."""
    with tempfile.TemporaryDirectory(prefix="optigpu-gate-", ignore_cleanup_errors=True) as scratch:
        opened = Repository(folder, Path(scratch), setup, stop)
        try:
            yield opened
        finally:
            opened.remove()


@contextmanager
def wheels(
    files: tuple[Path, Path], command: str, folder: Path, setup: str | None, stop: Stop
) -> Iterator[tuple[Side, Side]]:
    """Each wheel in a virtual environment of its own, with what it depends on. Python does not look for modules beside
    the script or in the folder, where the project's sources may lie. Raises SpecError, GateError."""
    for file in files:
        if not file.is_file():
            raise SpecError(f"There is no file {file}; name a wheel.")
    with tempfile.TemporaryDirectory(prefix="optigpu-gate-", ignore_cleanup_errors=True) as scratch:
        sides = []
        for name, file in zip(("base", "head"), files, strict=True):
            programs = Path(scratch) / name / "bin"
            path = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
            side = Side(file.name, str(file), command, folder, {"PATH": path, "PYTHONSAFEPATH": "1"})
            make = shlex.join([sys.executable, "-m", "venv", str(programs.parent)])
            add = shlex.join(
                [str(programs / "python"), "-m", "pip", "install", "--quiet", str(file.resolve())]
            )
            side = built(side, f"{make} && {add}", stop)
            sides.append(built(side, setup, stop))
        yield sides[0], sides[1]
