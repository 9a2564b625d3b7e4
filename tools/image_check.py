"""Checks that an image holds what techniques need and that its programs start: the last step of the Dockerfile.

    python tools/image_check.py --torch cuda --cuda 13.0 --project pyproject.toml

What techniques on a GPU need is read from files: a build has no GPU. Exit status 1 if something is missing or does not
start, with a sentence for each.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

CPU_OPERATOR = "from optigpu.ops.decode.cpu.interface import decoder_library; decoder_library()"


def problems(cuda: str | None, packages: Path, headers: Path, search_path: str | None = None) -> list[str]:
    """A sentence for each thing that is missing, of the libraries in `packages` and of what compiles.

    `cuda` is the version that torch must be built with, "13.0" for example, or None for a wheel without CUDA;
    `headers` are Python's.
    """
    found = [_torch(cuda, packages)]
    if cuda is not None:
        found += [_bitsandbytes(cuda, packages), _triton(packages)]
    found += [
        f"There is no {compiler} on PATH: install it; {why}."
        for compiler, why in (("g++", "torch.compile needs it"), ("gcc", "Triton needs it"))
        if shutil.which(compiler, path=search_path) is None
    ]
    if not (headers / "Python.h").is_file():
        found.append(
            f"Python's headers are not in {headers}: install them; torch.compile and Triton need them."
        )
    return [sentence for sentence in found if sentence]


def torch_cuda(packages: Path) -> str | None:
    """The CUDA version that torch was built with, read from its files; None for a build without CUDA."""
    version = packages / "torch" / "version.py"
    text = version.read_text() if version.is_file() else ""
    found = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found[1] if found else None


def programs(version: str) -> list[str]:
    """A sentence for each program of the image that does not start; `version` is what `optigpu --version` must say."""
    with tempfile.TemporaryDirectory() as cache:
        # What this compiles is for the CPU of the build, not for that of the host.
        environment = os.environ | {"XDG_CACHE_HOME": cache, "OPTIGPU_DATA_DIR": cache}
        return [
            sentence
            for command, said in _commands(version)
            if (sentence := _start(command, said, environment))
        ]


def _commands(version: str) -> list[tuple[list[str], str]]:
    """Each with what it must print."""
    return [
        (
            [
                "python",
                "-c",
                "import api.app, worker.app, worker.__main__, worker.pilot, worker.launch, optigpu.cli",
            ],
            "",
        ),
        (["optigpu", "--version"], version),
        (["python", "-m", "api", "--help"], "--root-path"),
        (["python", "-m", "worker", "--help"], "--device"),
        (["alembic", "heads"], "(head)"),
        (["python", "-c", CPU_OPERATOR], ""),
    ]


def _start(command: list[str], said: str, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    name, last = " ".join(command), (done.stdout.strip().splitlines() or ["(nothing)"])[-1]
    if done.returncode != 0:
        return f"`{name}` ends with status {done.returncode}: {last}"
    return "" if said in done.stdout else f"`{name}` does not say {said!r} but {last!r}."


def _torch(cuda: str | None, packages: Path) -> str:
    built = torch_cuda(packages)
    if built == cuda:
        return ""
    wheel, wanted = (f"with CUDA {each}" if each else "without CUDA" for each in (built, cuda))
    return (
        f"torch is built {wheel} and not {wanted}: install another wheel, or name its version as CUDA in the "
        "Dockerfile and the driver that it needs in docs/gpu-box.md."
    )


def _bitsandbytes(cuda: str, packages: Path) -> str:
    library = packages / "bitsandbytes" / f"libbitsandbytes_cuda{cuda.replace('.', '')}.so"
    return "" if library.is_file() else f"bitsandbytes has no library for CUDA {cuda}: {library} is missing."


def _triton(packages: Path) -> str:
    folder = packages / "triton" / "backends" / "nvidia" / "bin"
    return "" if (folder / "ptxas").is_file() else f"Triton has no assembler: {folder / 'ptxas'} is missing."


def main() -> int:
    """Prints what is missing or does not start, or that all is well; returns the exit status."""
    parser = argparse.ArgumentParser(prog="image_check", description="What an image must hold and start.")
    parser.add_argument("--torch", required=True, choices=("cuda", "cpu"), help="which wheel of torch")
    parser.add_argument(
        "--cuda", required=True, help="the CUDA version that torch is built with, unless it is for CPUs"
    )
    parser.add_argument("--project", required=True, type=Path, help="pyproject.toml, which names the version")
    given = parser.parse_args()
    cuda = given.cuda if given.torch == "cuda" else None
    found = problems(cuda, Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("include")))
    found += programs(tomllib.loads(given.project.read_text())["project"]["version"])
    what = f"torch, bitsandbytes and Triton for CUDA {cuda}" if cuda else "torch for CPUs"
    print("\n".join(found) or f"{what}, a compiler, Python's headers; the programs start.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
