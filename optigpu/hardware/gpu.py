"""GPUs: NVIDIA's through NVML, and AMD's, Intel's and Apple's, of which a process of its own asks torch.

Without the library or a working driver the machine counts as one without NVIDIA GPUs. Nothing of this has run beside
the others: it follows PyTorch's documentation of torch.cuda, torch.xpu and torch.mps.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optigpu
from optigpu.documents.result import Accelerator
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.hardware.nvml import Driver, Gpu
from optigpu.hardware.sensors import SensorError, or_none
from optigpu.vocabulary import DeviceKind


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use, the UUIDs of all cards, and the versions of driver and CUDA."""

    visible: tuple[Accelerator, ...] = ()
    uuids: tuple[str, ...] = ()
    driver: str | None = None
    cuda: str | None = None


def gpus() -> Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, in its order."""
    try:
        with Driver() as driver:
            uuids = tuple(card.uuid() for card in driver.cards())
            return Gpus(_visible(driver), uuids, driver.version(), or_none(driver.cuda_version))
    except SensorError:
        return Gpus()


@contextmanager
def job_gpu() -> Iterator[Gpu]:
    """The GPU that a job runs on: the first that CUDA shows to this process. Open for the block.

    Raises SensorError where there is none.
    """
    with Driver() as driver:
        shown = _visible(driver)
        if not shown:
            raise SensorError(
                "CUDA_VISIBLE_DEVICES selects no GPU that the driver knows; change or unset it."
            )
        yield driver.gpu(shown[0].uuid)


def require_sensors(device: DeviceKind) -> None:
    """Raises SensorError for a kind of device that NVML does not tell of."""
    reason = KINDS[device].lacks.get(Ability.SENSORS)
    if reason:
        raise SensorError(f"There is no reading of {KINDS[device].title}s: {reason}.")


def free_bytes(uuid: str) -> int | None:
    try:
        with Driver() as driver:
            return driver.gpu(uuid).free_bytes()
    except SensorError:
        return None


def visible(every: Sequence[Accelerator], chosen: str | None) -> tuple[Accelerator, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects: by number or prefix of the UUID, up to the first invalid one."""
    if chosen is None:
        return tuple(every)
    found: list[Accelerator] = []
    for word in filter(None, (part.strip() for part in chosen.split(","))):
        matches = [gpu for index, gpu in enumerate(every) if word == str(index) or gpu.uuid.startswith(word)]
        if len(matches) != 1:
            break
        found += matches
    return tuple(found)


def _visible(driver: Driver) -> tuple[Accelerator, ...]:
    return visible([_accelerator(gpu) for gpu in driver.gpus()], os.environ.get("CUDA_VISIBLE_DEVICES"))


def _accelerator(gpu: Gpu) -> Accelerator:
    clocks = (or_none(read) for read in (gpu.sm_clock_max_hz, gpu.memory_clock_max_hz))
    clock_hz, memory_clock_hz = (None if clock is None else round(clock) for clock in clocks)
    return Accelerator(
        name=gpu.name(),
        memory_bytes=gpu.memory_bytes(),
        uuid=gpu.uuid(),
        compute_capability=gpu.compute_capability(),
        clock_max_hz=clock_hz,
        memory_clock_max_hz=memory_clock_hz,
        power_limit_w=or_none(gpu.power_limit_w),
        persistence_mode=or_none(gpu.persistence_mode),
    )


PROGRAM = (sys.executable, "-P", "-m", "optigpu.backends.torch.device")
"""Tells what torch knows of its GPUs. -P keeps files of the working directory from being taken for modules."""
LIMIT_S = 120.0
"""Torch may have to be read from a slow disk."""


@dataclass(frozen=True)
class OfHost:
    """What torch does not tell: the host's id, its CPU (a Mac's chip has the GPU), and its memory."""

    id: str
    cpu_model: str
    memory_bytes: int


def built_for(
    torch_build: Mapping[str, str], system: str = platform.system(), machine: str = platform.machine()
) -> DeviceKind | None:
    """The one kind of such GPUs that this torch can use, by what it was built with; None for the others."""
    if "hip" in torch_build:
        return DeviceKind.ROCM
    if "xpu" in torch_build:
        return DeviceKind.XPU
    return DeviceKind.MPS if (system, machine) == ("Darwin", "arm64") else None


def other_gpus(kind: DeviceKind | None, host: OfHost) -> Gpus:
    """Those of that kind, in torch's order. No process is started where there can be none."""
    if kind is None:
        return Gpus()
    path = os.pathsep.join(
        filter(None, (str(Path(optigpu.__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
    variables = os.environ | {"PYTHONPATH": path}
    try:
        answer = subprocess.run(
            (*PROGRAM, kind), env=variables, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return Gpus()
    return of_answer(answer.stdout, kind, host) if answer.returncode == 0 else Gpus()


def of_answer(text: str, kind: DeviceKind, host: OfHost) -> Gpus:
    """The GPUs of the program's answer, a JSON list with torch's properties of each under torch's names."""
    told: list[dict[str, Any]] = json.loads(text)
    drivers = (each["driver_version"] for each in told if each.get("driver_version"))
    accelerators = (
        Accelerator(
            kind=kind,
            name=each.get("name") or host.cpu_model,
            memory_bytes=each.get("total_memory") or host.memory_bytes,
            uuid=each.get("uuid") or f"{kind}-{host.id}-{number}",
            architecture=each.get("gcnArchName", "").partition(":")[0] or None,  # "gfx942:sramecc+:xnack-"
        )
        for number, each in enumerate(told)
    )
    return Gpus(tuple(accelerators), driver=next(drivers, None))
