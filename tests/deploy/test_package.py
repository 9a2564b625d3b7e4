"""What `pip install optigpu` brings: the package, whole, with its data, and the other names that it is imported by."""

import subprocess
import sys
import tomllib
import zipfile
from shutil import copy, copytree, ignore_patterns

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.compose import ROOT

BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of the files in the wheel, built from a copy so that no build output lands in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "LICENSE"):
        copy(ROOT / name, source)
    for name in ("optigpu", "names", "api", "worker", "migrations"):
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, "."], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(source.glob("*.whl"))) as archive:
        return set(archive.namelist())


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_optigpu(wheel: set[str]) -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "optigpu").rglob("*") if path.is_file()}
    expected = {path.as_posix() for path in files if "__pycache__" not in path.parts}
    assert expected - wheel == set()


@pytest.mark.slow
def test_the_wheel_holds_nothing_else(wheel: set[str]) -> None:
    names = {path.name for path in (ROOT / "names").iterdir() if path.is_dir()}
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"optigpu", *names}


@pytest.mark.slow
def test_the_wheel_holds_the_other_import_names(wheel: set[str]) -> None:
    files = (ROOT / "names").rglob("*.py")
    assert {path.relative_to(ROOT / "names").as_posix() for path in files} - wheel == set()


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = [*project["dependencies"], *extras["service"], *extras["dev"]]
    assert {canonicalize_name(Requirement(line).name) for line in installed} - pinned == set()
