"""What administrators are shown: the audit log, and webhooks with their deliveries."""

from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, model_validator

from optigpu.vocabulary import METRICS, Frozen


class AuditAction(StrEnum):
    """A change that the audit log records."""

    ALERT_CREATED = "alert.created"
    ALERT_DELETED = "alert.deleted"
    DEVICE_ENROLLED = "device.enrolled"
    DEVICE_INVITED = "device.invited"
    DEVICE_KEY_CHANGED = "device.key_changed"
    DEVICE_KEY_REQUESTED = "device.key_requested"
    DEVICE_REVOKED = "device.revoked"
    EDGE_MODEL_ADDED = "edge_model.added"
    GATE_ADDED = "gate.added"
    JOB_CANCELLED = "job.cancelled"
    JOB_RETRIED = "job.retried"
    JOB_SUBMITTED = "job.submitted"
    JOB_WITHDRAWN = "job.withdrawn"
    KEY_CREATED = "key.created"
    KEY_REVOKED = "key.revoked"
    KEY_ROTATED = "key.rotated"
    OTHERS_IMPORTED = "others.imported"
    OTHERS_REMOVED = "others.removed"
    RESULT_WITHDRAWN = "result.withdrawn"
    RUN_IMPORTED = "run.imported"
    SIGNED_IN = "key.signed_in"
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

    ALERT_FIRED = "alert.fired"
    GATE_WORSE = "gate.worse"
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


class AlertKind(StrEnum):
    """What an alert rule asks: is the figure beyond a bound, or has the level of the history changed?"""

    THRESHOLD = "threshold"
    CHANGE_POINT = "change_point"


class AlertRequest(Frozen):
    """A rule for one variant on one class of hardware: the place of a result on the leaderboard."""

    result_id: str = Field(
        pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", description="A result of that place."
    )
    kind: AlertKind = Field(
        description="threshold: the figure is worse than a bound; change_point: its level has changed."
    )
    metric: str | None = Field(
        None, max_length=100, description="Default: the primary metric of the result's workload."
    )
    threshold: float | None = Field(
        None, description="Of threshold: the bound, in the metric's unit; null for change_point."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.metric is not None and self.metric not in METRICS:
            raise ValueError(f"metric: {self.metric} is not a metric; the metrics are {', '.join(METRICS)}.")
        if (self.threshold is None) is (self.kind is AlertKind.THRESHOLD):
            raise ValueError("threshold: a rule of the kind threshold needs it, and no other kind has one.")
        return self


class AlertView(Frozen):
    """A rule. `result_id` is the result whose place it watches, `fired_at` when it last fired; null: never."""

    id: str
    result_id: str
    label: str
    hardware_class: str
    metric: str
    kind: AlertKind
    threshold: float | None
    created_at: datetime
    created_by: str
    fired_at: datetime | None
