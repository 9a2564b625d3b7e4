"""Brings as wheels what a machine without a network lacks of the project's dependencies."""

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from optigpu.vocabulary import OptiGPUError
from tools.gpu_quarter.runner import ROOT

PYTHON, GLIBCS = "3.12", ("_2_28", "_2_27", "_2_17", "2014")
TESTS = ("hypothesis", "pytest", "pytest-timeout")
MOST_BYTES = 60 * 2**20


def bring(target: Path, have: Path) -> int:
    """Downloads what `have` does not name. Raises OptiGPUError if pip cannot, or for too much with the repository."""
    installed = {canonicalize_name(line) for line in have.read_text().split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (*project["dependencies"], *project["optional-dependencies"]["service"], *TESTS)
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(target)),
        *("--python-version", PYTHON, "--implementation", "cp", "-c", str(ROOT / "constraints.txt")),
        *(f"--platform=manylinux{glibc}_x86_64" for glibc in GLIBCS),
        *(line for line in lines if canonicalize_name(Requirement(line).name) not in installed),
    ]
    if subprocess.run(command, check=False).returncode:
        raise OptiGPUError("pip cannot bring these wheels; what it said is above.")
    for wheel in target.glob("*.whl"):
        if parse_wheel_filename(wheel.name)[0] in installed:
            wheel.unlink()
    held = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [*target.glob("*.whl"), *(ROOT / name for name in held.stdout.split("\0") if name)]
    if (total := sum(path.stat().st_size for path in paths if path.is_file())) > MOST_BYTES:
        raise OptiGPUError(f"Wheels and repository have {total} bytes, more than {MOST_BYTES}.")
    print(f"Wheels and repository have {total / 2**20:.1f} MiB.")
    return 0
