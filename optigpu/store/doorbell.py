"""The doorbell's names: it says "look" and nothing else; which job is next, the database knows."""

from optigpu.vocabulary import DeviceKind

LOOK_TASK = "optigpu.look"
"""The name of the task, which takes no arguments."""


def queue_for(device: DeviceKind) -> str:
    """The queue that workers of this kind of device listen to."""
    return f"optigpu.{device.value}"
