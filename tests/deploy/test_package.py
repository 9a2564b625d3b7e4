"""What `pip install optigpu` brings: the package, whole, with its data, and the other names that it is imported by."""

import json
import os
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.compose import ROOT
from tests.engine.test_cli_run import MEASURED, QUICK
from tests.wheels import built, installed


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> set[str]:
    """The names of the files in the wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
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


@pytest.mark.long
def test_the_installed_wheel_measures_outside_of_the_checkout(wheel_file: Path, tmp_path: Path) -> None:
    """A bundled model through a ladder, whose files and tables are those of the wheel."""
    folder = installed(wheel_file, tmp_path / "installed")
    variables = os.environ | {"PYTHONPATH": str(folder), "OPTIGPU_DATA_DIR": str(tmp_path / "data")}

    def optigpu(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "bin" / "optigpu"), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert optigpu("--version").stdout.split()[-1] == project["version"]
    shape = ("--prompt-tokens", "8", "--new-tokens", "4")
    ladder = ("ladder", "--model", "bundled:tiny", "--stack", "native_decode")
    ran = optigpu(*ladder, *shape, *QUICK, "--format", "json")
    assert ran.returncode in MEASURED, ran.stderr
    results = json.loads(ran.stdout)["results"]
    assert [result["variant"]["label"] for result in results] == ["baseline", "native_decode"]
    assert {result["provenance"]["git_revision"] for result in results} == {None}, "it is no checkout"


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(line.split("==")[0]) for line in lines if not line.startswith("#")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    # The extra dev names others of this package.
    chosen = (project["dependencies"], *(extras[name] for name in ("service", "dev", "docs", "frames")))
    installed = {canonicalize_name(Requirement(line).name) for lines in chosen for line in lines}
    assert installed - pinned == {project["name"]}
