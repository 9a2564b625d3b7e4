"""Who may measure at the same time on one host."""

from pathlib import Path

import pytest

from optigpu.conductor.processes.locks import hold
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind


class BusyError(Exception):
    """Somebody else has the device."""


def busy() -> None:
    raise BusyError


def machine(gpu: str) -> Environment:
    accelerator = Accelerator(name="g", memory_bytes=1, uuid=gpu)
    return probe().model_copy(update={"accelerators": (accelerator,)})


def is_free(folder: Path, device: DeviceKind, gpu: str) -> bool:
    try:
        with hold(folder, device, machine(gpu), busy):
            return True
    except BusyError:
        return False


CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((CPU, "a"), (CPU, "a")),
        ((CPU, "a"), (CUDA, "a")),
        ((CUDA, "a"), (CPU, "a")),
        ((CUDA, "a"), (CUDA, "a")),
    ],
)
def test_these_wait_for_each_other(
    tmp_path: Path, first: tuple[DeviceKind, str], second: tuple[DeviceKind, str]
) -> None:
    with hold(tmp_path, first[0], machine(first[1]), busy):
        assert not is_free(tmp_path, *second)
    assert is_free(tmp_path, *second)


def test_jobs_on_different_gpus_run_together(tmp_path: Path) -> None:
    with hold(tmp_path, CUDA, machine("a"), busy), hold(tmp_path, CUDA, machine("b"), busy) as locks:
        assert len(locks) == 2


def test_giving_up_while_waiting_leaves_no_lock(tmp_path: Path) -> None:
    with hold(tmp_path, CPU, machine("a"), busy):
        assert not is_free(tmp_path, CUDA, "a"), "it got the GPU and then waited for the host"
    assert is_free(tmp_path, CUDA, "a")
