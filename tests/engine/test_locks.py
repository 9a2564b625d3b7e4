"""Who may measure at the same time on one host."""

from pathlib import Path

import pytest

from optigpu.conductor.processes.locks import hold, others_measure
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import probe
from optigpu.vocabulary import DeviceKind
from worker.capabilities import serving


class BusyError(Exception):
    """Another job has the device."""


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


def test_a_worker_s_own_lock_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU worker keeps a lock in the same folder for as long as it lives."""
    gpus = tuple(Accelerator(name="g", memory_bytes=1, uuid=uuid) for uuid in ("GPU-a", "GPU-b"))
    here = probe().model_copy(update={"accelerators": gpus})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the worker sets it; restored after the test
    monkeypatch.setattr("worker.capabilities.probed", lambda _: here)
    with serving(CUDA, tmp_path), serving(CUDA, tmp_path), hold(tmp_path, CUDA, here, busy):
        assert len(list(tmp_path.iterdir())) == 4, "two workers, their first GPU, the host"
        assert not others_measure(tmp_path, CUDA, here)
        with hold(tmp_path, CUDA, machine("GPU-b"), busy):
            assert others_measure(tmp_path, CUDA, here)
