"""The priority of a measuring process: the highest that the system lets it have.

It needs root, CAP_SYS_NICE, or a limit that allows it (`ulimit -e`). Without one of these the process stays as it is,
and what others used is marked and bounded.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

HIGHEST = -20
_THREADS = Path("/proc/self/task")
_GROUP = Path("/proc/self/autogroup")
"""Where the kernel groups processes by session, it shares the CPUs among these groups first."""


def raise_priority() -> int:
    """Puts all threads of this process before those of others; returns the nice value that they have then."""
    if sys.platform == "linux":
        with suppress(PermissionError):
            for thread in os.listdir(_THREADS):
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, int(thread), HIGHEST)
        with suppress(OSError):  # no such groups, or not allowed
            _GROUP.write_text(str(HIGHEST))
    return nice()


def nice() -> int:
    """The nice value of this thread, from -20 (first) to 19 (last)."""
    return os.getpriority(os.PRIO_PROCESS, 0)
