"""NVIDIA GPUs as their driver names them, through NVML. No library, no driver, a broken driver: no GPU."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from optigpu.documents.result import Accelerator
from optigpu.hardware.nvml import Driver, Gpu
from optigpu.hardware.sensors import SensorError

T = TypeVar("T")


@dataclass(frozen=True)
class Gpus:
    """What a driver says: the GPUs that this process may use, the UUIDs of all, the versions of driver and CUDA."""

    visible: tuple[Accelerator, ...] = ()
    uuids: tuple[str, ...] = ()
    driver: str | None = None
    cuda: str | None = None


def gpus() -> Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order, and what holds for all."""
    try:
        with Driver() as driver:
            uuids = tuple(gpu.uuid() for gpu in driver.gpus())
            return Gpus(_visible(driver), uuids, driver.version(), _told(driver.cuda_version))
    except SensorError:
        return Gpus()


@contextmanager
def job_gpu() -> Iterator[Gpu]:
    """The one GPU that a job runs on: the first that CUDA shows to this process. Open for the block.

    Raises SensorError where there is none.
    """
    with Driver() as driver:
        shown = _visible(driver)
        if not shown:
            raise SensorError(
                "CUDA_VISIBLE_DEVICES selects no GPU that the driver knows; change or unset it."
            )
        yield driver.gpu(shown[0].uuid)


def free_bytes(uuid: str) -> int | None:
    """Free memory of a GPU, or None where its driver does not say."""
    try:
        with Driver() as driver:
            return driver.gpu(uuid).free_bytes()
    except SensorError:
        return None


def visible(every: Sequence[Accelerator], chosen: str | None) -> tuple[Accelerator, ...]:
    """Those that CUDA shows for CUDA_VISIBLE_DEVICES: numbers or beginnings of UUIDs, up to the first wrong one."""
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
    return Accelerator(
        name=gpu.name(),
        memory_bytes=gpu.memory_bytes(),
        uuid=gpu.uuid(),
        compute_capability=gpu.compute_capability(),
        clock_max_hz=_whole(_told(gpu.sm_clock_max_hz)),
        memory_clock_max_hz=_whole(_told(gpu.memory_clock_max_hz)),
        power_limit_w=_told(gpu.power_limit_w),
        persistence_mode=_told(gpu.persistence_mode),
    )


def _told(read: Callable[[], T]) -> T | None:
    """A reading, or None where this GPU or this driver does not give it."""
    try:
        return read()
    except SensorError:
        return None


def _whole(clock_hz: float | None) -> int | None:
    return None if clock_hz is None else round(clock_hz)
