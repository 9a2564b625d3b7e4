"""Kubernetes: `kubectl`. No cluster has run this: only what it writes and how it reads answers was checked."""

import json
from collections.abc import Collection, Mapping

from pydantic import BaseModel, Field, ValidationError

from optigpu.clusters import Task
from optigpu.clusters.kubernetes import APP, TOKEN_KEY, URL_KEY, manifest
from optigpu.documents.views import LaunchState
from worker.launchers.base import Access, Seen
from worker.launchers.programs import ask, nonsense

_LABELS = ",".join(f"{name}={value}" for name, value in APP.items())


class _Condition(BaseModel):
    type: str
    status: str
    reason: str = ""


class _Status(BaseModel):
    active: int = 0
    conditions: list[_Condition] = Field(default_factory=list)


class _Metadata(BaseModel):
    name: str


class _Job(BaseModel):
    metadata: _Metadata
    status: _Status = _Status()


class _Jobs(BaseModel):
    items: list[_Job]


class Kubernetes:
    """The cluster and namespace of kubectl's current context."""

    def submit(self, task: Task, access: Access) -> str:
        """The Job with its Secret, on stdin: arguments are shown to everybody on this machine."""
        job = manifest(task)
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": job.metadata.model_dump(by_alias=True),
            "stringData": {URL_KEY: access.url, TOKEN_KEY: access.token},
        }
        parts = [secret, job.model_dump(mode="json", by_alias=True, exclude_none=True)]
        both = {"apiVersion": "v1", "kind": "List", "items": parts}
        ask(["kubectl", "create", *task.options, "--filename=-"], text=json.dumps(both))
        return task.name

    def status(self, references: Collection[str]) -> Mapping[str, Seen]:
        answer = ask(["kubectl", "get", "jobs", f"--selector={_LABELS}", "--output=json"])
        try:
            jobs = _Jobs.model_validate_json(answer).items
        except ValidationError:
            raise nonsense("kubectl", answer) from None
        return {job.metadata.name: _seen(job) for job in jobs}

    def cancel(self, reference: str) -> None:
        ask(
            [
                "kubectl",
                "delete",
                f"job/{reference}",
                f"secret/{reference}",
                "--ignore-not-found",
                "--wait=false",
            ]
        )


def _seen(job: _Job) -> Seen:
    name = job.metadata.name
    for condition in job.status.conditions:
        if condition.status == "True" and condition.type in ("Complete", "Failed"):
            why = f" ({condition.reason})" if condition.reason else ""
            reason = f"The Job {name} ended as {condition.type}{why}; its log: kubectl logs job/{name}"
            return Seen(reference=name, state=LaunchState.ENDED, reason=reason)
    state = LaunchState.RUNNING if job.status.active else LaunchState.PENDING
    return Seen(reference=name, state=state)
