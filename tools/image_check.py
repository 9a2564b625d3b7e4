"""Checks that an image holds what techniques on a GPU need; the Dockerfile runs it at the end of a build.

    python tools/image_check.py --cuda 13.0

Loads none of the libraries: a build has no GPU. Exit status 1 if something is missing, with a sentence for each.
"""

import argparse
import re
import shutil
import sys
import sysconfig
from pathlib import Path


def problems(cuda: str, packages: Path, headers: Path, search_path: str | None = None) -> list[str]:
    """A sentence for each thing that is missing, of the libraries in `packages` and of what compiles.

    `cuda` is the version that torch must be built with, "13.0" for example; `headers` are Python's.
    """
    found = [_torch(cuda, packages), _bitsandbytes(cuda, packages), _triton(packages)]
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


def _torch(cuda: str, packages: Path) -> str:
    built = torch_cuda(packages)
    if built == cuda:
        return ""
    return (
        f"torch is built {f'with CUDA {built}' if built else 'without CUDA'} and not with CUDA {cuda}: install another "
        "wheel, or name its version as CUDA in the Dockerfile and the driver that it needs in docs/gpu-box.md."
    )


def _bitsandbytes(cuda: str, packages: Path) -> str:
    library = packages / "bitsandbytes" / f"libbitsandbytes_cuda{cuda.replace('.', '')}.so"
    return "" if library.is_file() else f"bitsandbytes has no library for CUDA {cuda}: {library} is missing."


def _triton(packages: Path) -> str:
    folder = packages / "triton" / "backends" / "nvidia" / "bin"
    return "" if (folder / "ptxas").is_file() else f"Triton has no assembler: {folder / 'ptxas'} is missing."


def main() -> int:
    """Prints what is missing, or that nothing is; returns the exit status."""
    parser = argparse.ArgumentParser(prog="image_check", description="What techniques on a GPU need.")
    parser.add_argument("--cuda", required=True, help="the CUDA version that torch must be built with")
    cuda = parser.parse_args().cuda
    found = problems(cuda, Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("include")))
    print(
        "\n".join(found) or f"torch, bitsandbytes and Triton for CUDA {cuda}, a compiler, Python's headers."
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
