"""Packages that only some techniques need, and the extras of this project that install them."""

from typing import Literal

from optigpu.documents.result import Environment

Package = Literal["bitsandbytes", "gptqmodel"]
_EXTRAS: dict[Package, str] = {"bitsandbytes": "quant", "gptqmodel": "gptq"}


def missing(package: Package, environment: Environment) -> str | None:
    """Why a package cannot be used, with the command that installs it; None where it is installed."""
    return None if package in environment.software else how_to_install(package)


def how_to_install(package: Package) -> str:
    """The error's sentence, with the command that installs the package."""
    return f"{package} is not installed; install it with: pip install -e '.[{_EXTRAS[package]}]'."
