"""The wheel of this checkout, and an installation of it outside: what is missing in the wheel is missing there."""

import subprocess
import sys
from pathlib import Path
from shutil import copy, copytree, ignore_patterns

from tests.pages import ROOT

BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"


def built(source: Path) -> Path:
    """The wheel, made in an empty folder from a copy, so that no build output lands in the checkout."""
    for name in ("pyproject.toml", "LICENSE"):
        copy(ROOT / name, source)
    for name in ("optigpu", "names", "api", "worker", "migrations"):
        copytree(ROOT / name, source / name, ignore=ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, "."], cwd=source, check=True, capture_output=True)
    return next(source.glob("*.whl"))


def installed(wheel: Path, folder: Path) -> Path:
    """The folder with the wheel's packages alone: named in PYTHONPATH it comes before the checkout, and what it
    needs is found where the tests run."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--no-index", "--target", str(folder), str(wheel)], check=True)
    return folder
