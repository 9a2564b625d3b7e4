"""What this process can run: one accelerator, or the CPU."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import structlog

from optigpu import __version__
from optigpu.backends import BACKENDS
from optigpu.conductor.processes.room import WORKER_PREFIX
from optigpu.documents.result import Accelerator, Environment
from optigpu.documents.selftest import SelfTestSummary
from optigpu.documents.versions import COMPARED
from optigpu.hardware import hardware_class
from optigpu.hardware.device_kinds import no_device
from optigpu.hardware.probe import probed
from optigpu.models.held import held_models, may_download
from optigpu.selftest import kept
from optigpu.store.workers import WorkerInfo
from optigpu.surgery.extras import OPTIONAL_PACKAGES
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError, new_id

log = structlog.stdlib.get_logger(__name__)

ROOT = Path("/")
"""Asked anew, not by way of `probe`, which remembers the hardware: each job's own probe must see one GPU alone."""


@contextmanager
def serving(wanted: DeviceKind | None, locks: Path) -> Iterator[WorkerInfo]:
    """Takes a device for as long as the block lasts and says what this process can run.

    If no device is named it is an NVIDIA GPU where there is one, else the CPU. Of several of these it takes the first
    that no other worker serves, and hides the others from this process and its children; of other GPUs the first that
    torch sees. Raises UnsupportedError when there is none.
    """
    environment = probed(ROOT)
    device = wanted or (DeviceKind.CUDA if environment.has(DeviceKind.CUDA) else DeviceKind.CPU)
    if device is DeviceKind.CPU:
        yield info(device, environment)
        return
    gpus = environment.gpus(device)
    if not gpus:
        raise UnsupportedError(f"{no_device(device, environment)}; start the worker with --device cpu.")
    # torch takes the first GPU, and only one of NVIDIA's is chosen here.
    with _first_free(gpus if device is DeviceKind.CUDA else gpus[:1], locks) as gpu:
        if device is DeviceKind.CUDA:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu.uuid
        yield info(device, probed(ROOT))


def info(device: DeviceKind, environment: Environment) -> WorkerInfo:
    """The description of a worker for `device` on this machine."""
    gpus = environment.gpus(device)
    return WorkerInfo(
        id=new_id(),
        host_id=environment.host_id,
        hardware_class=hardware_class(environment, device),
        device=device,
        gpus=tuple(gpu.name for gpu in gpus),
        gpu_uuid=gpus[0].uuid if gpus else None,
        memory_bytes=environment.memory_bytes,
        vram_bytes=min((gpu.memory_bytes for gpu in gpus), default=None),
        backends=tuple(name for name, backend in BACKENDS.items() if not backend.missing(environment)),
        packages=tuple(name for name in OPTIONAL_PACKAGES if name in environment.software),
        models=held_models(),
        downloads=may_download(),
        version=__version__,
        software={name: environment.software[name] for name in COMPARED if name in environment.software},
        selftest=_selftest(environment, device),
    )


def with_models(worker: WorkerInfo) -> WorkerInfo:
    """The description with the models that lie on this machine now."""
    return worker.model_copy(update={"models": held_models(), "downloads": may_download()})


def _selftest(environment: Environment, device: DeviceKind) -> SelfTestSummary | None:
    """What the last self-test of the device found, if it holds for this hardware and software."""
    found = kept.read(environment, device)
    if found.ignored:
        log.warning("selftest.ignored", reason=found.ignored)
    return found.outcome.summary if found.outcome else None


@contextmanager
def _first_free(gpus: Sequence[Accelerator], locks: Path) -> Iterator[Accelerator]:
    for gpu in gpus:
        with _open(locks, f"{WORKER_PREFIX}{gpu.uuid}.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield gpu
            return
    raise UnsupportedError("Other workers serve every GPU of this machine; start this one with --device cpu.")


def _open(locks: Path, name: str) -> IO[str]:
    try:
        locks.mkdir(parents=True, exist_ok=True)
        return (locks / name).open("a")
    except OSError as error:
        raise OptiGPUError(
            f"No lock file can be made in {locks} ({error.strerror}); name another folder with OPTIGPU_LOCK_DIR."
        ) from error
