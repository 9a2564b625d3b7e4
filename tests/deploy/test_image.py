"""The image's command and its check of what it holds; tests/docker builds it."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deploy.compose import ROOT, read_compose
from tools.image_check import problems, torch_cuda

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def named_cuda() -> str:
    """The CUDA version that the Dockerfile names."""
    (version,) = re.findall(r"^ARG CUDA=(\S+)$", DOCKERFILE, re.MULTILINE)
    return str(version)


def test_the_image_runs_the_api_as_the_compose_file_does() -> None:
    services = read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"})["services"]
    command = ", ".join(f'"{word}"' for word in services["api"]["command"])
    assert DOCKERFILE.endswith(f"CMD [{command}]\n")


def test_bitsandbytes_as_it_is_pinned_has_a_library_for_that_cuda() -> None:
    """Read of the package that is installed here, which is the one that constraints.txt pins."""
    installed = find_spec("bitsandbytes")
    assert installed is not None
    library = f"libbitsandbytes_cuda{named_cuda().replace('.', '')}.so"
    assert Path(str(installed.origin)).with_name(library).is_file()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """What a check looks at in a good image: packages, headers, programs."""
    files = {
        "packages/torch/version.py": "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n",
        "packages/bitsandbytes/libbitsandbytes_cuda130.so": "",
        "packages/triton/backends/nvidia/bin/ptxas": "",
        "include/Python.h": "",
        "bin/g++": "",
        "bin/gcc": "",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def said(image: Path) -> list[str]:
    return problems("13.0", image / "packages", image / "include", str(image / "bin"))


def test_a_good_image_has_no_problem(image: Path) -> None:
    assert said(image) == []
    assert torch_cuda(image / "packages") == "13.0"


@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ("packages/torch/version.py", "torch is built without CUDA and not with CUDA 13.0"),
        ("packages/bitsandbytes/libbitsandbytes_cuda130.so", "bitsandbytes has no library for CUDA 13.0"),
        ("packages/triton/backends/nvidia/bin/ptxas", "Triton has no assembler"),
        ("include/Python.h", "Python's headers are not in"),
        ("bin/g++", "There is no g++ on PATH"),
        ("bin/gcc", "There is no gcc on PATH"),
    ],
)
def test_what_is_missing_in_an_image_is_a_sentence(image: Path, lost: str, sentence: str) -> None:
    (image / lost).unlink()
    (problem,) = said(image)
    assert problem.startswith(sentence)


def test_a_wheel_of_another_cuda_is_named(image: Path) -> None:
    version = image / "packages" / "torch" / "version.py"
    version.write_text(version.read_text().replace("'13.0'", "'12.6'"))
    (problem,) = said(image)
    assert problem.startswith("torch is built with CUDA 12.6 and not with CUDA 13.0")
