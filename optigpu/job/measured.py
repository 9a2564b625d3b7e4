"""Variants as their results have them, with the hashes of what was read, which their digests contain.

And the request that measures a stored result's variant again with this version.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import JsonValue

from optigpu.documents.result import Provenance, Result, VariantSummary
from optigpu.job.spec import Variant
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import SCHEMA_VERSION, SpecError
from optigpu.workloads import WORKLOADS


def as_measured(variant: Variant) -> Variant | None:
    """The variant as its result has it, as far as that can be known before anything is read where it is measured. None
    where only who reads the files can know their hashes: those of the hub and of folders may change under their names,
    as may labelled images and whatever a server serves."""
    if variant.endpoint is not None or variant.workload.has_labels:
        return None
    if variant.model is None:
        return variant
    reference = parse_reference(variant.model)
    if reference.kind == "preset":
        return variant
    if reference.kind == "bundled":
        return variant.model_copy(update={"weights": _bundled_hash(reference.name)})
    return None


@lru_cache
def _bundled_hash(name: str) -> str:
    with (BUNDLED[name] / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measured(variant: Variant, provenance: Provenance) -> Variant:
    """The variant with the hashes of the files that its weights and its images came from. Random weights leave it as it
    was: they are the same thing to measure whichever seed or library drew them."""
    known = {"weights": provenance.weight_hash if provenance.weight_hash_of == "files" else None}
    if variant.workload.has_labels:
        known["dataset"] = provenance.dataset_hash
    return variant.model_copy(update={name: value for name, value in known.items() if value is not None})


def summary_of(variant: Variant) -> VariantSummary:
    """The summary of a variant that its result contains. Of a workload whose largest batch is looked for it has the
    limit in the place of the batch."""
    workload: dict[str, JsonValue] = variant.workload.model_dump(mode="json")
    if variant.memory_limit_bytes is not None:
        workload.pop("batch_size", None)
        workload["memory_limit_bytes"] = variant.memory_limit_bytes
    return VariantSummary(
        index=variant.index,
        role=variant.role,
        label=variant.label,
        workload=workload,
        model=variant.model,
        backend=variant.backend,
        endpoint=variant.endpoint,
        device=variant.device,
        stack=tuple(technique.model_dump(mode="json") for technique in variant.stack),
        workload_digest=variant.workload_digest,
        variant_digest=variant.digest,
        primary_metric=variant.primary,
    )


def unplanned(result: Result, plan: Iterable[Variant]) -> str | None:
    """Why a result is not of the variant of its index in a plan, as a clause, or None if it is. Its digests are
    computed again, with the hashes of its provenance where this machine cannot know them: files that were read
    elsewhere are believed to have the hash that the result names, and rank only beside the same ones."""
    said = result.variant
    planned = next((variant for variant in plan if variant.index == said.index), None)
    if planned is None:
        return f"there is no variant {said.index}"
    read = measured(planned, result.provenance) if result.provenance else planned
    expected = summary_of(as_measured(planned) or read)
    differing = (
        name
        for name in VariantSummary.model_fields
        if not _agrees(getattr(said, name), getattr(expected, name))
    )
    name = next(differing, None)
    return None if name is None else f"its {name} is not that of variant {said.index}"


def _agrees(said: Any, expected: Any) -> bool:
    """Whether two values are the same, but for parameters that are younger than the document that has the first."""
    if isinstance(expected, Mapping):
        named = said.keys() >= {"kind", "name"} & expected.keys()
        return named and all(each in expected and _agrees(said[each], expected[each]) for each in said)
    if isinstance(expected, tuple):
        return len(said) == len(expected) and all(map(_agrees, said, expected))
    return bool(said == expected)


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
