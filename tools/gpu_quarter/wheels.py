"""Brings as wheels what a machine without a network lacks of the project's dependencies."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from optigpu.vocabulary import OptiGPUError
from tools.gpu_quarter.runner import ROOT

PYTHON = "3.12"
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
TESTS = ("hypothesis", "pytest", "pytest-timeout")
MOST_BYTES = 60 * 2**20


def bring(target: Path, have: Path) -> int:
    """Downloads wheels into `target`; returns their bytes. Raises OptiGPUError if pip cannot, or with the repository
    they are more than MOST_BYTES."""
    installed = {canonicalize_name(line) for line in have.read_text().split()}
    wanted = [each for each in dependencies() if canonicalize_name(each.name) not in installed]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--python-version", PYTHON),
        *("--implementation", "cp", *platforms, "-c", str(ROOT / "constraints.txt"), "-d", str(target)),
        *map(str, wanted),
    ]  # fmt: skip
    if subprocess.run(command, check=False).returncode:
        raise OptiGPUError("pip cannot bring these wheels; what it said is above.")
    total = 0
    for wheel in target.glob("*.whl"):
        if parse_wheel_filename(wheel.name)[0] in installed:
            wheel.unlink()
        else:
            total += wheel.stat().st_size
    if total + repository_bytes() > MOST_BYTES:
        raise OptiGPUError(
            f"The wheels and the repository are more than {MOST_BYTES} bytes: {total} of wheels."
        )
    return total


def dependencies() -> list[Requirement]:
    """Of the library, the service and the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [
        Requirement(each)
        for each in (*project["dependencies"], *project["optional-dependencies"]["service"], *TESTS)
    ]
    return [each for each in found if each.marker is None or each.marker.evaluate()]


def repository_bytes() -> int:
    """What git holds of this checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.split("\0") if name)
    return sum(path.stat().st_size for path in paths if path.is_file())
