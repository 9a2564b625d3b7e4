"""What a measuring process is denied: the network where its job needs none, and files that would fill the disk. And the
folders that it has: the scratch folder of its job, and a temporary one of its own.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from optigpu.child import confined
from optigpu.hardware.wall_meter import WALL_METER
from optigpu.job.spec import Variant
from optigpu.meters.base import QualityOptions
from optigpu.models.held import may_download
from optigpu.paths import data_dir, plain_path
from optigpu.quality.text import comes_from_hub
from optigpu.vocabulary import DeviceKind, ReplicateError

RESERVE_BYTES = 2**30
"""Of the disk's free space: not even one file of this size may be taken from what is left."""
LEAST_LARGEST_BYTES = 2**30
OVER_THE_NETWORK = ("vllm", "tensorrt_llm")
"""Engines whose processes find each other by the host's address."""
UVM = Path("/dev/nvidia-uvm")
"""CUDA's first use makes it, by a program of the driver that needs an administrator's rights."""


def confined_program(program: Sequence[str], *, network: bool, folder: Path) -> tuple[str, ...]:
    """The command that confines the program `python ... -m MODULE ...` and runs it; any other one stays as it is.
    `folder` is on the disk whose free space bounds a file."""
    if "-m" not in program:
        return tuple(program)
    at = program.index("-m") + 1
    options = (
        confined.__name__,
        str(largest_file(folder)),
        confined.NETWORK if network else confined.LOOPBACK,
    )
    return (*program[:at], *options, *program[at:])


def largest_file(folder: Path) -> int:
    """Bytes: no single file can take the last of the disk's free space."""
    return max(shutil.disk_usage(folder).free - RESERVE_BYTES, LEAST_LARGEST_BYTES)


def needs_network(variant: Variant, quality: QualityOptions | None) -> bool:
    """Whether a process that measures the variant must reach others: the hub, a server, a wall meter. `quality` is
    None where it is not measured."""
    downloads = bool(variant.hub_repositories) or (quality is not None and comes_from_hub(quality.text))
    return (
        (downloads and may_download())
        or variant.endpoint is not None
        or variant.backend in OVER_THE_NETWORK
        or os.environ.get(WALL_METER, "").startswith(("http://", "https://"))
        or (variant.device is DeviceKind.CUDA and not UVM.exists())
    )


ABANDONED_S = 2 * 86400.0
"""A scratch folder that has not changed for so long belongs to a worker that was killed."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one job, removed after it. It is on disk, because the logits in it may not fit into memory."""
    root = _root()
    for folder in root.iterdir():
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder)
    with tempfile.TemporaryDirectory(prefix="job-", dir=root, ignore_cleanup_errors=True) as folder_name:
        yield Path(folder_name)


def temporary_folder() -> Path:
    """A new folder for the temporary files of one process, beside the jobs' folders: what a killed worker left is
    removed with theirs. Raises ReplicateError when it cannot be made."""
    try:
        return Path(tempfile.mkdtemp(prefix="tmp-", dir=_root()))
    except OSError as error:
        raise ReplicateError(
            f"No temporary directory for the measuring process can be made in {data_dir()} ({error.strerror})."
        ) from error


def _root() -> Path:
    root = plain_path(data_dir()) / "scratch"
    root.mkdir(parents=True, exist_ok=True)
    return root
