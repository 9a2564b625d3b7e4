"""A variant: what a job measures, and the digests that say what it can be compared with."""

import hashlib
from typing import Any

from optigpu.documents.endpoints import engine_name
from optigpu.job.spec.stack import BackendName
from optigpu.models.reference import parse_reference
from optigpu.techniques import AnyTechnique
from optigpu.vocabulary import DeviceKind, Frozen, Role, canonical_json
from optigpu.workloads import AnyWorkload
from optigpu.workloads.base import Workload

LARGEST_BATCH = "largest_batch"
"""The metric of the plan batch_scaling."""
HUB = "hub:"
"""How references to the hub begin."""


class Variant(Frozen):
    """One measurable thing: a single workload on a model with a resolved stack, backend and device.

    `rung` is the technique that a ladder's variant adds, or that an ablation's leaves out, and None elsewhere.
    `weights` is the hash of the files that the model came from, and `dataset` that of the images that are classified:
    they are known only after they were read, since the files under one name may change. With `memory_limit_bytes` its
    largest batch under that limit is looked for, whatever its workload's batch is, and no speed.
    """

    index: int
    role: Role
    label: str
    rung: str | None = None
    workload: AnyWorkload
    model: str | None
    backend: BackendName = "torch"
    endpoint: str | None = None
    device: DeviceKind
    stack: tuple[AnyTechnique, ...] = ()
    weights: str | None = None
    dataset: str | None = None
    memory_limit_bytes: int | None = None

    @property
    def primary(self) -> str:
        return self.workload.primary if self.memory_limit_bytes is None else LARGEST_BATCH

    @property
    def compiles(self) -> bool:
        """Whether its first request compiles or captures."""
        return any(technique.phase.compiles for technique in self.stack)

    @property
    def engine(self) -> str:
        return engine_name(self.backend, self.endpoint)

    @property
    def hub_repositories(self) -> tuple[str, ...]:
        """The repositories of the hub that it loads: its model, and those that its techniques name, such as a draft."""
        values = (value for technique in self.stack for value in technique.model_dump().values())
        named = (name for name in (self.model, *values) if isinstance(name, str) and name.startswith(HUB))
        return tuple(dict.fromkeys(parse_reference(name).name for name in named))

    @property
    def workload_digest(self) -> str:
        """Equal for results that can be compared; a result's digest includes the weights' hash."""
        more = {
            "weights": self.weights,
            "dataset": self.dataset,
            "memory_limit_bytes": self.memory_limit_bytes,
        }
        known = {name: value for name, value in more.items() if value}
        return digest({"workload": self.workload.identity(), "model": self.model} | known)

    @property
    def digest(self) -> str:
        """Equal for results of the same variant; role and label are not part of it."""
        parts = {
            "workload": self.workload_digest,
            "stack": [technique.identity() for technique in self.stack],
            "backend": self.backend,
            "device": self.device,
        }
        if self.endpoint is not None:
            parts["endpoint"] = self.endpoint
        if self.workload.implementation is not None:
            parts["implementation"] = self.workload.implementation
        return digest(parts)


def digest(document: Any) -> str:
    """SHA-256 of a document's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()


def expand_workload(workload: Workload) -> tuple[Workload, ...]:
    """The single workloads of a request's workload, without repetitions."""
    return tuple(dict.fromkeys(workload.expand()))
