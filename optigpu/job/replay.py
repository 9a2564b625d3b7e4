"""Makes the request that measures a stored result's variant again with this version."""

from collections.abc import Mapping
from typing import Any

from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import SCHEMA_VERSION, SpecError
from optigpu.workloads import WORKLOADS

Document = dict[str, Any]


def replay_request(
    result: Mapping[str, Any], spec: Mapping[str, Any] | None, measure: Mapping[str, Any]
) -> Document:
    """A job, as JSON, of the one variant that `result` is of: its stored stack, with the same seed. How to measure and
    the limits come from its job's `spec`, where that is known; `measure` overrides them. Raises SpecError for a
    result of a later schema version or of one below 1, when its workload or a technique does not exist any more, and
    for a largest batch."""
    variant, version = result["variant"], result["schema_version"]
    if version > SCHEMA_VERSION:  # the older ones differ only in results
        raise SpecError(
            f"The result has schema version {version} and this is {SCHEMA_VERSION}; replay it with the version of "
            "OptiGPU that stored it, or a later one."
        )
    if version < 1:
        raise SpecError(
            f"This version cannot upgrade a request of schema version {version}; submit a new job."
        )
    if "memory_limit_bytes" in variant["workload"]:
        raise SpecError(
            "The result is the largest batch under a limit; post its job, or run batch-scaling, again."
        )
    asked = spec or {}
    request = {
        "workload": variant["workload"],
        "model": variant["model"],
        "backend": variant["backend"],
        "endpoint": variant.get("endpoint"),
        "device": variant["device"],
        "stack": list(variant["stack"]),
        "plan": "single",
        "seed": result["seed"],
        "measure": {**asked.get("measure", {}), **measure},
        "limits": dict(asked.get("limits", {})),
    }
    _require(variant["workload"]["kind"], WORKLOADS, "workload")
    for technique in variant["stack"]:
        _require(technique["name"], TECHNIQUES, "technique")
    return request


def _require(name: str, known: Mapping[str, Any], noun: str) -> None:
    if name not in known:
        raise SpecError(
            f"The result cannot be measured again: the {noun} {name} does not exist in this version, which has "
            f"{', '.join(known)}."
        )


def replay_note(stored: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Returns a note if the replayed variant differs from the original, else None."""
    if stored["variant"]["variant_digest"] == new["variant"]["variant_digest"]:
        return None
    return "This is not exactly the same variant: the version of a technique or the content of a digest has changed."
