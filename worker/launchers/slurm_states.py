"""Slurm's states of a job, and what each means for a launch."""

from collections.abc import Collection

from optigpu.documents.views import LaunchState

WAITS = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "POWER_UP_NODE", "RESV_DEL_HOLD", "EXPEDITING"}
)
"""It has no nodes yet, or no longer and will get others."""
HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT"})
"""It waits for a person, who may never come: to us it is over, and its token with it."""
BUSY = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT", "UPDATE_DB"}
)
"""Processes of it may be alive."""
OVER = frozenset(
    {
        *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"),
        *("OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    }
)


def launch_state(names: Collection[str]) -> LaunchState:
    """A state with its flags, in any order. What Slurm calls by a name of a later version may still run."""
    said = set(names)
    if said & HELD:
        return LaunchState.ENDED
    if said & WAITS:
        return LaunchState.PENDING
    if said & BUSY or not said & OVER:
        return LaunchState.RUNNING
    return LaunchState.ENDED
