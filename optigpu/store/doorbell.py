"""Where workers are notified: the broker's address, the task and the queues. A message holds no job."""

from optigpu.vocabulary import DeviceKind

LOOK_TASK = "optigpu.look"
"""The name of the Celery task; it takes no arguments."""


def queue_for(device: DeviceKind) -> str:
    """The queue that workers of this kind of device listen to."""
    return f"optigpu.{device.value}"


def broker_url(redis_url: str) -> str:
    """The address for Celery, which checks no certificate of a `rediss://` address unless the address asks for it."""
    if not redis_url.startswith("rediss://") or "ssl_cert_reqs=" in redis_url:
        return redis_url
    return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"
