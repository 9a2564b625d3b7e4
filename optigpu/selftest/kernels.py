"""Checks the kernels of optigpu.ops, which bring their references, operands and bounds with them.

A `selftest.py` in a folder of optigpu.ops holds the functions in its `KERNELS`, by name. They load torch, so they are
imported when the checks are listed, in the measuring process.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

from optigpu import ops
from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.ops.kernel_check import KernelCheck
from optigpu.selftest.setting import Setting
from optigpu.workloads.matmul import Matmul

FILE = "selftest.py"


@cache
def kernels() -> Mapping[str, KernelCheck]:
    """Every kernel's check by its name."""
    root = Path(ops.__path__[0])
    paths = sorted(path.relative_to(root).with_suffix("") for path in root.rglob(FILE))
    modules = (import_module(".".join((ops.__name__, *path.parts))) for path in paths)
    return {name: check for module in modules for name, check in module.KERNELS.items()}


def kernel_checks() -> Iterator[SelfCheck]:
    """Each kernel on each of its devices."""
    for name, check in kernels().items():
        for device in check.devices:
            yield SelfCheck(subject=Subject.KERNEL, name=name, device=device)


def run_kernel(check: SelfCheck, setting: Setting) -> Comparison:
    """What the kernel's own check finds. Raises UnsupportedError where the kernel, or torch itself, cannot run."""
    setting.prepared(Matmul(), None)
    return kernels()[check.name].run(setting.device)
