"""Names of the task and the queues that notify workers. A message holds no job: workers read the database."""

from optigpu.vocabulary import DeviceKind

LOOK_TASK = "optigpu.look"
"""The name of the Celery task; it takes no arguments."""


def queue_for(device: DeviceKind) -> str:
    """The queue that workers of this kind of device listen to."""
    return f"optigpu.{device.value}"
