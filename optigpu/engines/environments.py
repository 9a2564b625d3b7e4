"""Where the environments of engines are, and what a measuring process in one is started with.

An environment is whole when its record is there: the installer writes it last.
"""

import json
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from optigpu.engines.recipes import RECIPES, Recipe
from optigpu.paths import cache_dir

RECORD = "engine.json"
SHARED = "optigpu_shared.pth"
"""Among the packages of an environment that shares: the folders of OptiGPU's own."""
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class EngineEnvironment:
    """The environment of one engine, which may not be there yet."""

    recipe: Recipe

    @property
    def folder(self) -> Path:
        """Under the cache folder."""
        return cache_dir() / "engines" / self.recipe.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The folder that its packages are installed in."""
        where = {"base": str(self.folder), "platbase": str(self.folder)}
        return Path(sysconfig.get_path("platlib", "venv", vars=where))

    @property
    def is_whole(self) -> bool:
        """Whether it was made as the recipe says now, for this version of Python, and what it shares is still there."""
        try:
            record = json.loads((self.folder / RECORD).read_text("utf-8"))
        except (OSError, ValueError):
            return False
        file = self.packages / SHARED
        shared = file.read_text("utf-8").splitlines() if file.exists() else []
        whole = self.python.exists() and record == self.identity
        return whole and all(Path(each).is_dir() for each in shared)

    @property
    def identity(self) -> dict[str, str]:
        """What the record holds: another recipe or another Python makes another environment."""
        return {"recipe": repr(self.recipe), "python": _VERSION}

    @property
    def versions(self) -> dict[str, str]:
        """The packages that were installed there, by name."""
        found = distributions(path=[str(self.packages)])
        return {each.metadata["Name"].lower().replace("_", "-"): each.version for each in found}


def environment_of(backend: str) -> EngineEnvironment | None:
    """The environment of a backend's engine, where it has one that is whole."""
    recipe = RECIPES.get(backend)
    environment = EngineEnvironment(recipe) if recipe else None
    return environment if environment and environment.is_whole else None


def not_installed(backend: str) -> str | None:
    """Why an engine with a recipe cannot run, with the command that helps, or None."""
    if environment_of(backend):
        return None
    recipe = RECIPES[backend]
    return f"{backend} is not installed; install it with: {recipe.install_command} (about {recipe.minutes} minutes)"


def program_of(backend: str, program: Sequence[str]) -> tuple[str, ...]:
    """A program of OptiGPU's as it is started for a backend: by the interpreter of its environment, if it has one."""
    environment = environment_of(backend)
    if environment is None or program[0] != sys.executable:
        return tuple(program)
    return (str(environment.python), *program[1:])


def variables_of(backend: str) -> dict[str, str]:
    """The variables that the backend's measuring processes get."""
    environment = environment_of(backend)
    return dict(environment.recipe.variables) if environment else {}


def software_of(backend: str, software: Mapping[str, str]) -> dict[str, str]:
    """The versions that a backend's measuring processes import; `software` has those of this environment.

    Packages of the engine's own environment that no recipe or result names are left out.
    """
    environment = environment_of(backend)
    if environment is None:
        return dict(software)
    named = {*software, *environment.recipe.brings}
    own = {name: version for name, version in environment.versions.items() if name in named}
    kept = software if environment.recipe.shares else {"python": software["python"]}
    return {**kept, **own}
