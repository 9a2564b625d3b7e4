"""Where workers are notified: the broker's address, the task and the queues. A message only names a job: one that is
lost, late or repeated changes nothing."""

from optigpu.vocabulary import DeviceKind

LOOK_TASK = "optigpu.look"
"""The name of the Celery task; its one argument is a job's id."""


def message(job_id: str, device: DeviceKind) -> dict[str, object]:
    """What Celery's `send_task` is given for a job that was posted: Celery's own tools show it by the job's id."""
    return {"name": LOOK_TASK, "args": (job_id,), "task_id": job_id, "queue": queue_for(device)}


def repeated(job_id: str, device: DeviceKind) -> dict[str, object]:
    """The same for a job whose message may be lost, with an id of its own: workers ignore one that was revoked."""
    return {"name": LOOK_TASK, "args": (job_id,), "queue": queue_for(device)}


def queue_for(device: DeviceKind) -> str:
    """The queue that workers of this kind of device listen to."""
    return f"optigpu.{device.value}"


def broker_url(redis_url: str) -> str:
    """The address for Celery, which checks no certificate of a `rediss://` address unless the address asks for it."""
    if not redis_url.startswith("rediss://") or "ssl_cert_reqs=" in redis_url:
        return redis_url
    return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"
