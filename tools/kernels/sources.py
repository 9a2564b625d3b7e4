"""Every Triton kernel of the package with its examples, found by the names of their files."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from triton import JITFunction

import optigpu.ops
from optigpu.hardware.catalog import Capability
from optigpu.ops.launch import Example, LaunchTarget
from optigpu.vocabulary import OptiGPUError

FOLDER = Path(optigpu.ops.__file__).parent


def files() -> list[str]:
    """The modules that kernels may be in: triton_*.py of optigpu/ops, without their package's name."""
    paths = sorted(FOLDER.rglob("triton_*.py"))
    return [".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in paths]


def module_of(file: str) -> ModuleType:
    """The module of a file that `files` lists."""
    return importlib.import_module(f"optigpu.ops.{file}")


def kernels_of(module: ModuleType) -> list[str]:
    """The kernels that a module has. Other compiled functions are parts of kernels: they ask for no program id."""
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
        and value.__module__ == module.__name__
        and "tl.program_id(" in value.src
    ]


def examples_of(file: str, capability: Capability) -> list[Example]:
    """The examples of a file's kernels, as they are launched on a GPU of that capability.

    Raises OptiGPUError if a kernel has none, or two of one name.
    """
    module = module_of(file)
    kernels = kernels_of(module)
    if not kernels:
        return []
    target = LaunchTarget.of_card(capability.multiprocessors, capability.parts)
    found = list(module.examples(target)) if hasattr(module, "examples") else []
    check_examples(file, kernels, [(name_of(example), example.name) for example in found])
    return found


def name_of(example: Example) -> str:
    """The name of an example's kernel."""
    return str(example.call.kernel.__name__)


def check_examples(file: str, kernels: Sequence[str], examples: Sequence[tuple[str, str]]) -> None:
    """Raises OptiGPUError if a kernel has no example, or two of one name. An example: its kernel's name and its own."""
    with_one = {kernel for kernel, _ in examples}
    for kernel in kernels:
        if kernel not in with_one:
            raise OptiGPUError(
                f"{kernel} in optigpu/ops/{file.replace('.', '/')}.py has no example: add a launch of it to `examples`."
            )
    for example in examples:
        if examples.count(example) > 1:
            raise OptiGPUError(f"{example[0]} has two examples called {example[1]!r}: rename one.")
