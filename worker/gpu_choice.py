"""The one GPU that a worker was told to serve."""

import os

from optigpu.hardware.nvml import Driver
from optigpu.vocabulary import UnsupportedError


def show_only(uuid: str) -> None:
    """Hides every GPU and MIG slice but one from this process and its children.

    `uuid` is its UUID as `nvidia-smi -L` lists it, or the beginning of it. Raises UnsupportedError if it names no GPU
    or several, SensorError if the driver cannot be asked.
    """
    with Driver() as driver:
        names = {gpu.uuid(): gpu.name() for gpu in driver.gpus()}
    found = [each for each in names if each.startswith(uuid)]
    listed = ", ".join(f"{each} ({name})" for each, name in names.items())
    if not found:
        raise UnsupportedError(f"This machine has no GPU {uuid}; it has: {listed or 'none'}.")
    if len(found) > 1:
        raise UnsupportedError(f"Several GPUs begin with {uuid}: {listed}; write the whole UUID.")
    os.environ["CUDA_VISIBLE_DEVICES"] = found[0]
