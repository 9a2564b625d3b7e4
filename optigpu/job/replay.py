"""Makes the request that measures a stored result's variant again with this version."""

from collections.abc import Callable, Mapping
from typing import Any

from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import SCHEMA_VERSION, SpecError
from optigpu.workloads import WORKLOADS

Document = dict[str, Any]
Upgrade = Callable[[Document], Document]


def _unchanged(request: Document) -> Document:
    return request


UPGRADES: Mapping[int, Upgrade] = {1: _unchanged}
"""For each older schema version, the function that upgrades its request by one version. Version 2 changed only
results."""


def replay_request(
    result: Mapping[str, Any], spec: Mapping[str, Any] | None, measure: Mapping[str, Any]
) -> Document:
    """A job, as JSON, of the one variant that `result` is of: its stored stack, with the same seed.

    How to measure and the limits come from its job's `spec`, where that is known; `measure` overrides them. Raises
    SpecError when a later version stored the result, when its workload or a technique does not exist any more, and for
    a largest batch.
    """
    variant = result["variant"]
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
        "measure": dict(asked.get("measure", {})),
        "limits": dict(asked.get("limits", {})),
    }
    request = upgraded(request, result["schema_version"])
    _require(request["workload"]["kind"], WORKLOADS, "workload")
    for technique in request["stack"]:
        _require(technique["name"], TECHNIQUES, "technique")
    return request | {"measure": request["measure"] | dict(measure)}


def upgraded(
    request: Document,
    version: int,
    upgrades: Mapping[int, Upgrade] = UPGRADES,
    current: int = SCHEMA_VERSION,
) -> Document:
    """A request of an older schema version as one of the current version. Raises SpecError for one that is unknown."""
    if version > current:
        raise SpecError(
            f"The result has schema version {version} and this is {current}; replay it with the version of OptiGPU "
            "that stored it, or a later one."
        )
    for older in range(version, current):
        if older not in upgrades:
            raise SpecError(
                f"This version cannot upgrade a request of schema version {older}; submit a new job."
            )
        request = upgrades[older](request)
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
