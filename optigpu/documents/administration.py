"""What administrators are shown: the audit log, and webhooks with their deliveries."""

from datetime import datetime
from enum import StrEnum
from typing import Any

from pydantic import Field

from optigpu.vocabulary import Frozen


class AuditAction(StrEnum):
    """A change that the audit log records."""

    DEVICE_ENROLLED = "device.enrolled"
    DEVICE_INVITED = "device.invited"
    DEVICE_KEY_CHANGED = "device.key_changed"
    DEVICE_KEY_REQUESTED = "device.key_requested"
    DEVICE_REVOKED = "device.revoked"
    EDGE_MODEL_ADDED = "edge_model.added"
    JOB_CANCELLED = "job.cancelled"
    JOB_RETRIED = "job.retried"
    JOB_SUBMITTED = "job.submitted"
    JOB_WITHDRAWN = "job.withdrawn"
    KEY_CREATED = "key.created"
    KEY_REVOKED = "key.revoked"
    KEY_ROTATED = "key.rotated"
    RESULT_WITHDRAWN = "result.withdrawn"
    RUN_IMPORTED = "run.imported"
    WEBHOOK_CREATED = "webhook.created"
    WEBHOOK_DELETED = "webhook.deleted"


class AuditView(Frozen):
    """A change. `target` is the id of what was changed; `name` is that of the key, device or user who did it."""

    id: str
    at: datetime
    action: str
    target: str
    name: str
    key_id: str | None
    address: str | None
    request_id: str | None
    details: dict[str, Any]


class AuditPage(Frozen):
    """Changes, the newest first; `next_cursor` leads to the page after this one."""

    changes: tuple[AuditView, ...]
    next_cursor: str | None = None


class WebhookEvent(StrEnum):
    """An event that webhooks can ask for."""

    JOB_FINISHED = "job.finished"
    REGRESSION_FOUND = "regression.found"


class WebhookRequest(Frozen):
    """Where events are to be sent, and which."""

    url: str = Field(
        min_length=1,
        max_length=2000,
        pattern=r"^[!-~]+$",
        description="An https address with a public address; others must be allowed by the settings.",
    )
    events: tuple[WebhookEvent, ...] = Field(min_length=1, max_length=16, description="The events to send.")


class WebhookView(Frozen):
    """A webhook without its secret. `created_by` is the name of the key."""

    id: str
    url: str
    events: tuple[WebhookEvent, ...]
    created_at: datetime
    created_by: str


class NewWebhookView(WebhookView):
    """A webhook with its secret, which is shown once."""

    secret: str


class Webhooks(Frozen):
    """Every webhook, the oldest first."""

    webhooks: tuple[WebhookView, ...]


class DeliveryView(Frozen):
    """An event for a webhook. `next_at` is null once it was delivered, or given up after the last attempt."""

    id: str
    event: str
    created_at: datetime
    attempts: int
    next_at: datetime | None
    delivered_at: datetime | None
    last_error: str | None


class DeliveryPage(Frozen):
    """Deliveries, the newest first; `next_cursor` leads to the page after this one."""

    deliveries: tuple[DeliveryView, ...]
    next_cursor: str | None = None
