"""An environment of an engine's own: made by pip, found by the conductor, and run as the measuring process."""

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from optigpu.cli import app
from optigpu.engines.environments import (
    RECIPES,
    EngineEnvironment,
    Mended,
    Recipe,
    environment_of,
    not_installed,
    program_of,
    software_of,
    variables_of,
)
from optigpu.engines.install import install, remove
from optigpu.hardware import probe
from optigpu.measure import REPLICATE
from optigpu.vocabulary import OptiGPUError, UnsupportedError, VariantStatus
from tests.engine.caches import BUILDS, OPERATORS, PEAKS, cache_with
from tests.engine.sessions import brief_job, measured

pytestmark = pytest.mark.slow

SETUP = """
from setuptools import setup
setup(name="mended-engine", version="2.5", py_modules=["mended_engine", "added"])
"""
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_with(tmp_path, BUILDS, OPERATORS, PEAKS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Of a wheel, and of a source distribution that lacks a file; both lie in a folder, as an index would have them."""
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "small_engine", "1.0", "NAME = 'small'\n")
    wheel(index, "not_wanted", "1.0", "")
    source(index)
    made = Recipe(
        name="llama_cpp",  # a backend that this environment can run too
        summary="for a test",
        minutes=1,
        bytes=1,
        packages=("small-engine", "not-wanted"),
        mended=(Mended("mended-engine==2.5", {"added.py": "WHAT = 'added'\n"}),),
        removes=("not-wanted",),
        shares=True,
        building={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_NO_BUILD_ISOLATION": "0"},
        variables={"CUDA_FOR_A_TEST": "yes"},
    )
    monkeypatch.setitem(RECIPES, made.name, made)
    return made


def wheel(index: Path, name: str, version: str, text: str) -> None:
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        folder = f"{name}-{version}.dist-info"
        archive.writestr(f"{name}.py", text)
        archive.writestr(f"{folder}/METADATA", METADATA.format(name=name, version=version))
        archive.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{folder}/RECORD", "")


def source(index: Path) -> None:
    folder = index / "mended_engine-2.5"
    folder.mkdir()
    (folder / "setup.py").write_text(SETUP)
    (folder / "mended_engine.py").write_text("import added\n")
    (folder / "PKG-INFO").write_text(METADATA.format(name="mended-engine", version="2.5"))
    with tarfile.open(index / "mended_engine-2.5.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)


def said(environment: EngineEnvironment, program: str) -> str:
    command = [str(environment.python), "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.long
def test_it_is_made_as_the_recipe_says_and_found_from_then_on(recipe: Recipe) -> None:
    told: list[str] = []
    assert not_installed(recipe.name) == (
        "llama_cpp is not installed; install it with: optigpu engines install llama_cpp (about 1 minutes)"
    )
    assert program_of(recipe.name, REPLICATE) == REPLICATE
    environment = install(recipe, told.append, jobs=1)
    assert told[0] == "making the environment"
    assert "compiling mended-engine, which takes about 1 minutes" in told
    assert said(
        environment, "import small_engine, mended_engine as m; print(small_engine.NAME, m.added.WHAT)"
    ) == ("small added")
    assert said(environment, "import numpy, sys; print(numpy.__file__.startswith(sys.prefix))") == "False", (
        "shared"
    )
    assert environment.versions.keys() == {"small-engine", "mended-engine"}
    assert environment_of(recipe.name) == environment
    assert not_installed(recipe.name) is None
    assert program_of(recipe.name, REPLICATE) == (str(environment.python), *REPLICATE[1:])
    assert program_of("torch", REPLICATE) == REPLICATE
    assert variables_of(recipe.name) == {"CUDA_FOR_A_TEST": "yes"}
    software = software_of(recipe.name, {"python": "3", "numpy": "1"})
    assert software == {"python": "3", "numpy": "1", "small-engine": "1.0", "mended-engine": "2.5"}
    told.clear()
    install(recipe, told.append, jobs=1)
    assert told == [], "it is there already"
    assert remove(recipe)
    assert not remove(recipe)


@pytest.mark.long
def test_what_fails_says_where_all_of_it_is_and_is_begun_anew(recipe: Recipe) -> None:
    broken = replace(recipe, packages=("no-such-package",))
    with pytest.raises(
        OptiGPUError, match=r"could not be installed; all that was printed is in .*install\.log"
    ):
        install(broken, lambda _: None, jobs=1)
    assert not EngineEnvironment(broken).is_whole
    assert install(recipe, lambda _: None, jobs=1).is_whole


def test_what_must_be_there_before_is_asked_for_first(recipe: Recipe) -> None:
    with pytest.raises(UnsupportedError, match="no-such-compiler cannot be found; install a C"):
        install(replace(recipe, commands=("no-such-compiler",)), lambda _: None, jobs=1)
    with pytest.raises(UnsupportedError, match=r"takes about 1048576\.0 GiB"):
        install(replace(recipe, bytes=2**50), lambda _: None, jobs=1)
    assert not EngineEnvironment(recipe).folder.exists()
    if sys.version_info < (3, 12):
        assert "_distutils" in str(import_module("distutils").__file__), "setuptools' own is still the one"


@pytest.mark.long
@pytest.mark.llama
def test_a_job_is_measured_by_its_interpreter_and_its_results_have_its_versions(
    recipe: Recipe, tmp_path: Path
) -> None:
    environment = install(recipe, lambda _: None, jobs=1)
    # Whoever imports it in the measuring process tells which interpreter that is.
    (environment.packages / "sitecustomize.py").write_text(
        f"import os, sys\nwith open({str(tmp_path / 'told')!r}, 'a') as file:\n"
        "    file.write(sys.prefix + os.environ['CUDA_FOR_A_TEST'] + '\\n')\n"
    )
    spec = brief_job(model="preset:tiny-llama-test", beside=[{"backend": "llama_cpp"}])
    report = measured(spec, tmp_path / "locks")
    assert [outcome.status for outcome in report.outcomes] == [VariantStatus.SUCCEEDED] * 2
    torch, llama = report.results
    assert set((tmp_path / "told").read_text().split()) == {f"{environment.folder}yes"}
    own = {"small-engine": "1.0", "mended-engine": "2.5"}
    assert llama.environment.software == torch.environment.software | own
    assert llama.environment.software_fingerprint != torch.environment.software_fingerprint
    assert torch.environment.software == probe().software


@pytest.mark.long
def test_the_command_lists_installs_and_removes(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> str:
        app(["engines", *words], standalone_mode=False)
        return capsys.readouterr().out

    assert '"installed": false' in command("list", "--format", "json")
    assert "llama_cpp is installed in" in command("install", "llama_cpp", "--jobs", "1")
    assert '"installed": true' in command("list", "--format", "json").split('"llama_cpp"')[1]
    assert command("remove", "llama_cpp") == "llama_cpp is removed.\n"
    assert command("remove", "llama_cpp") == "llama_cpp was not installed.\n"
    with pytest.raises(
        OptiGPUError, match="no environment to make for 'nothing'; the engines that have one are"
    ):
        command("install", "nothing")
