"""A file that says until when this worker counts as alive, for a container's health check.

Its modification time lies in the future: it is when the worker's last sign of life expires. So a check needs no Python,
which would take a core from what is measured: `test -n "$(find FILE -newermt now)"`.
"""

import os
import time
from pathlib import Path

from optigpu.vocabulary import OptiGPUError


def renew(path: Path, lease_s: float) -> None:
    """Says that the worker is alive for another `lease_s` seconds. Raises OptiGPUError if it cannot be written."""
    until = time.time() + lease_s
    try:
        path.touch()
        os.utime(path, (until, until))
    except OSError as error:
        raise OptiGPUError(
            f"The heartbeat file {path} cannot be written ({error.strerror}); name another with OPTIGPU_HEARTBEAT_FILE."
        ) from error
