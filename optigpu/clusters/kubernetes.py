"""The manifest of a job for Kubernetes: a batch/v1 Job of one pod, as JSON.

The token is in a Secret of the same name, which the launcher creates with the Job. The models hold the fields that are
used here, so that a manifest with another one, or with a name that Kubernetes refuses, cannot be made.
"""

import json
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic.alias_generators import to_camel

from optigpu.clusters.task import WARNED_S, Task
from optigpu.vocabulary import Frozen

APP = {"app.kubernetes.io/name": "optigpu"}
TOKEN_KEY, URL_KEY = "token", "url"
_GPU = "nvidia.com/gpu"

Name = Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A DNS label."""
Value = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?)?$")]
"""A label's value."""
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|[kKMGTPE]i?)?$")]


class _Object(Frozen, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True):
    """Kubernetes writes its fields in camel case."""


class Metadata(_Object):
    name: Name
    labels: dict[str, Value]


class PodMetadata(_Object):
    labels: dict[str, Value]


class SecretKey(_Object):
    name: Name
    key: Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]


class Source(_Object):
    secret_key_ref: SecretKey


class Variable(_Object):
    """Its value, or from where it comes."""

    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
    value: str | None = None
    value_from: Source | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.value is None) == (self.value_from is None):
            raise ValueError("a variable has either a value or a source")
        return self


class Resources(_Object):
    limits: dict[str, Quantity]


class SecurityContext(_Object):
    allow_privilege_escalation: bool


class Container(_Object):
    name: Name
    image: Annotated[str, Field(min_length=1)]
    command: tuple[str, ...]
    env: tuple[Variable, ...]
    resources: Resources
    security_context: SecurityContext


class PodSpec(_Object):
    restart_policy: Literal["Never", "OnFailure"]
    automount_service_account_token: bool
    termination_grace_period_seconds: Annotated[int, Field(ge=0)]
    containers: Annotated[tuple[Container, ...], Field(min_length=1)]


class Pod(_Object):
    metadata: PodMetadata
    spec: PodSpec


class JobOfPods(_Object):
    backoff_limit: Annotated[int, Field(ge=0)]
    active_deadline_seconds: Annotated[int, Field(gt=0)]
    ttl_seconds_after_finished: Annotated[int, Field(ge=0)]
    template: Pod


class Manifest(_Object):
    """A Job of Kubernetes' API batch/v1."""

    api_version: Literal["batch/v1"] = "batch/v1"
    kind: Literal["Job"] = "Job"
    metadata: Metadata
    spec: JobOfPods


def manifest(task: Task) -> Manifest:
    """One pod, for the job's time limit; another one if the first is lost with its node."""
    labels = {**APP, "optigpu/job": task.job_id}
    container = Container(
        name="pilot",
        image=task.image,
        command=_command(task),
        env=(
            _from_secret("OPTIGPU_URL", task.name, URL_KEY),
            _from_secret("OPTIGPU_PILOT_TOKEN", task.name, TOKEN_KEY),
            Variable(name="OPTIGPU_KUBERNETES_JOB", value=task.name),
        ),
        resources=Resources(limits={_GPU: str(task.gpus)} if task.gpus else {}),
        security_context=SecurityContext(allow_privilege_escalation=False),
    )
    pod = PodSpec(
        restart_policy="Never",
        automount_service_account_token=False,
        termination_grace_period_seconds=WARNED_S,
        containers=(container,),
    )
    job = JobOfPods(
        backoff_limit=2,
        active_deadline_seconds=task.minutes * 60,
        ttl_seconds_after_finished=86400,
        template=Pod(metadata=PodMetadata(labels=labels), spec=pod),
    )
    return Manifest(metadata=Metadata(name=task.name, labels=labels), spec=job)


def script(task: Task) -> str:
    """The manifest as it is submitted."""
    return (
        json.dumps(manifest(task).model_dump(mode="json", by_alias=True, exclude_none=True), indent=2) + "\n"
    )


def _command(task: Task) -> tuple[str, ...]:
    """The pilot; after the lines of the setup, in a shell that it takes the place of."""
    if not task.setup:
        return task.command
    return ("sh", "-c", f'{task.setup}\nexec "$@"', "pilot", *task.command)


def _from_secret(variable: str, name: str, key: str) -> Variable:
    return Variable(name=variable, value_from=Source(secret_key_ref=SecretKey(name=name, key=key)))
