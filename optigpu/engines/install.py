"""Makes the environment of an engine as its recipe says."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions, requires
from pathlib import Path

from filelock import FileLock

from optigpu.engines.environments import RECORD, SHARED, EngineEnvironment, Mended, Recipe
from optigpu.engines.libraries import Machine, build_facts
from optigpu.hardware.cpu import cpu_features
from optigpu.vocabulary import OptiGPUError, UnsupportedError

_TAIL = 15


def install(recipe: Recipe, say: Callable[[str], None], jobs: int) -> EngineEnvironment:
    """The environment of an engine; made if it is not whole. Compilers run `jobs` at a time.

    `say` is told what goes on. Raises UnsupportedError where something must be installed first, and OptiGPUError when a
    step fails; what was begun is then removed at the next try.
    """
    environment = EngineEnvironment(recipe)
    _require(recipe)
    environment.folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(environment.folder.with_suffix(".lock")):
        if not environment.is_whole:
            shutil.rmtree(environment.folder, ignore_errors=True)
            _make(environment, say, jobs)
            (environment.folder / RECORD).write_text(json.dumps(environment.identity), "utf-8")
            found = build_facts(recipe.name, Machine(cpu_features()))
            if found and found.lacks:
                lacks = " and ".join(found.lacks)
                say(f"{found.library} lacks {lacks}, which this CPU has; see install.log in its folder")
    return environment


def remove(recipe: Recipe) -> bool:
    """Removes an engine's environment; whether there was one."""
    folder = EngineEnvironment(recipe).folder
    was_there = folder.is_dir()
    shutil.rmtree(folder, ignore_errors=True)
    return was_there


def _require(recipe: Recipe) -> None:
    """Raises UnsupportedError for what is missing on this machine."""
    absent = [name for name in recipe.commands if shutil.which(name) is None]
    if absent:
        raise UnsupportedError(
            f"{recipe.name} is compiled here, and {' and '.join(absent)} cannot be found; install a C++ compiler with "
            "make (on Debian and Ubuntu: apt-get install build-essential), then run the command again."
        )
    # To look for the module pip would have setuptools give up its distutils in this process, which TorchInductor needs.
    if not any(distributions(name="pip")):
        raise UnsupportedError("pip is not in this environment; add it with: python -m ensurepip")
    place = EngineEnvironment(recipe).folder
    there = next(parent for parent in place.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < recipe.bytes:
        raise UnsupportedError(
            f"{recipe.name} takes about {recipe.bytes / 2**30:.1f} GiB, and {there} has {free / 2**30:.1f} GiB left; "
            "make room there, or set XDG_CACHE_HOME to a larger disk."
        )


def _make(environment: EngineEnvironment, say: Callable[[str], None], jobs: int) -> None:
    recipe = environment.recipe
    say("making the environment")
    # A PYTHONPATH would hide the environment's own packages.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    steps = _Steps(environment, {**kept, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs), **recipe.building})
    steps.run([sys.executable, "-m", "venv", "--without-pip", str(environment.folder)])
    wanted = [*recipe.packages]
    if recipe.shares:
        found = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
        own = dict.fromkeys(path for path in found if os.path.isdir(path))
        (environment.packages / SHARED).write_text("".join(f"{path}\n" for path in own), "utf-8")
    else:
        wanted += [line for line in requires("optigpu") or () if "extra ==" not in line]
    if wanted:
        say("installing packages")
        steps.pip("install", *wanted)
    for package in recipe.mended:
        say(f"compiling {package.name}, which takes about {recipe.minutes} minutes")
        _build(package, steps)
    if recipe.removes:
        steps.pip("uninstall", "--yes", *recipe.removes)


def _build(package: Mended, steps: "_Steps") -> None:
    """Installs a package from its source, with the files that it lacks."""
    with tempfile.TemporaryDirectory(prefix="optigpu-") as name:
        folder = Path(name)
        steps.pip("download", "--no-deps", "--no-binary", package.name, "--dest", name, package.requirement)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as content:
            content.extractall(folder / "source", filter="data")
        (source,) = (folder / "source").iterdir()
        for path, text in package.added.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_text(text, "utf-8")
        steps.pip("install", str(source))


@dataclass(frozen=True)
class _Steps:
    """Runs the programs of an installation; what they print is in install.log, in the environment's folder."""

    environment: EngineEnvironment
    variables: Mapping[str, str]

    def pip(self, *arguments: str) -> None:
        """OptiGPU's own pip, on the engine's environment."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.environment.python)]
        self.run([*pip, "--disable-pip-version-check", "--no-input", *arguments])

    def run(self, command: Sequence[str]) -> None:
        """Raises OptiGPUError, with the end of what was printed, when the program fails."""
        self.environment.folder.mkdir(exist_ok=True)
        log = self.environment.folder / "install.log"
        with log.open("a+", encoding="utf-8", errors="replace") as printed:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env=self.variables,
            )
            if done.returncode:
                printed.seek(0)
                last = "\n".join(printed.read().strip().splitlines()[-_TAIL:])
                raise OptiGPUError(
                    f"{self.environment.recipe.name} could not be installed; all that was printed is in {log}. Its "
                    f"end:\n{last}"
                )
