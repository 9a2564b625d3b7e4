"""Host memory that is free for this process."""

from pathlib import Path

import psutil

from optigpu.hardware.cgroup import ROOT, memory_left


def free_host_bytes(root: Path = ROOT) -> int:
    """Bytes that a new process can have: what the machine has available, and the control group's limit still allows.

    `root` is the root of the file system, so that a test can hand in another.
    """
    available = int(psutil.virtual_memory().available)
    left = memory_left(root)
    return available if left is None else min(available, left)
