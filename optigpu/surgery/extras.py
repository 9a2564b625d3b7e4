"""Packages that only some techniques and backends need, and the extras of this project that install them."""

from collections.abc import Iterable
from typing import Literal

from optigpu.documents.result import Environment

Package = Literal["bitsandbytes", "gptqmodel", "peft"]
"""What a technique may need."""

_EXTRAS = {"bitsandbytes": "quant", "torchao": "quant", "gptqmodel": "gptq", "peft": "train"}
_ENGINES = ("llama-cpp-python", "gguf", "ai-edge-litert", "openvino", "nncf")
OPTIONAL_PACKAGES = (*_EXTRAS, "triton", *_ENGINES)
"""Packages that a machine may have or lack; workers say which they have. Triton comes with torch for NVIDIA GPUs."""


def missing(packages: Iterable[Package], environment: Environment) -> str | None:
    """Why the first package that is not installed cannot be used, with the command that installs it; else None."""
    absent = (package for package in packages if package not in environment.software)
    return next(map(how_to_install, absent), None)


def how_to_install(package: Package) -> str:
    """The error's sentence, with the command that installs the package."""
    return f"{package} is not installed; install it with: {install_command(package)}."


def install_command(package: str) -> str:
    """What installs a package in a checkout."""
    extra = _EXTRAS.get(package)
    return f"pip install -e '.[{extra}]'" if extra else f"pip install {package}"
