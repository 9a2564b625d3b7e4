"""GPUs that only torch tells of: AMD's, Intel's and Apple's. A process of its own asks it, since nothing here loads it.

Nothing of this has run beside such a GPU: it follows PyTorch's documentation of torch.cuda, torch.xpu and torch.mps.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optigpu
from optigpu.documents.result import Accelerator
from optigpu.vocabulary import DeviceKind

PROGRAM = (sys.executable, "-P", "-m", "optigpu.backends.torch.told_gpus")
"""Says what torch knows of its GPUs. -P keeps files of the working directory from being taken for modules."""
LIMIT_S = 120.0
"""Torch may have to be read from a slow disk. Without an answer there is no such GPU."""


@dataclass(frozen=True)
class OfHost:
    """What torch does not tell: the host's id, its CPU, which on a Mac is the chip with the GPU, and its memory."""

    id: str
    cpu_model: str
    memory_bytes: int


@dataclass(frozen=True)
class OtherGpus:
    """The GPUs that torch may use, and the version of their driver where it tells that."""

    gpus: tuple[Accelerator, ...] = ()
    driver: str | None = None


def built_for(
    torch_build: Mapping[str, str], system: str = platform.system(), machine: str = platform.machine()
) -> DeviceKind | None:
    """The one kind of such GPUs that this torch can use, by what it was built with; None for the others."""
    if "hip" in torch_build:
        return DeviceKind.ROCM
    if "xpu" in torch_build:
        return DeviceKind.XPU
    return DeviceKind.MPS if (system, machine) == ("Darwin", "arm64") else None


def other_gpus(kind: DeviceKind | None, host: OfHost) -> OtherGpus:
    """Those of that kind, in torch's order. No process is started where there can be none."""
    if kind is None:
        return OtherGpus()
    path = os.pathsep.join(
        filter(None, (str(Path(optigpu.__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
    variables = os.environ | {"PYTHONPATH": path}
    try:
        answer = subprocess.run(
            (*PROGRAM, kind), env=variables, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return OtherGpus()
    return of_answer(answer.stdout, kind, host) if answer.returncode == 0 else OtherGpus()


def of_answer(text: str, kind: DeviceKind, host: OfHost) -> OtherGpus:
    """The GPUs of the program's answer, a JSON list with torch's properties of each under torch's names."""
    told: list[dict[str, Any]] = json.loads(text)
    drivers = (each["driver_version"] for each in told if each.get("driver_version"))
    return OtherGpus(tuple(_accelerators(told, kind, host)), next(drivers, None))


def _accelerators(told: list[dict[str, Any]], kind: DeviceKind, host: OfHost) -> Iterator[Accelerator]:
    for number, each in enumerate(told):
        architecture = each.get("gcnArchName", "").partition(":")[0]  # "gfx942:sramecc+:xnack-"
        yield Accelerator(
            kind=kind,
            name=each.get("name") or host.cpu_model,
            memory_bytes=each.get("total_memory") or host.memory_bytes,
            uuid=each.get("uuid") or f"{kind}-{host.id}-{number}",
            architecture=architecture or None,
        )
