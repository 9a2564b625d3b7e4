"""NVIDIA GPUs through NVML. Without the library or a working driver the machine counts as one without GPUs."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from optigpu.documents.result import Accelerator
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.hardware.nvml import Driver, Gpu
from optigpu.hardware.sensors import SensorError
from optigpu.vocabulary import DeviceKind

T = TypeVar("T")


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
            return Gpus(_visible(driver), uuids, driver.version(), _told(driver.cuda_version))
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
    """Free memory of a GPU; None if its driver does not report it."""
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
    """A reading; None if the GPU or the driver does not report it."""
    try:
        return read()
    except SensorError:
        return None


def _whole(clock_hz: float | None) -> int | None:
    return None if clock_hz is None else round(clock_hz)
