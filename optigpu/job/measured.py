"""Variants as their results have them: with the hashes of what was read, which their digests contain."""

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import JsonValue

from optigpu.documents.result import Provenance, Result, VariantSummary
from optigpu.job.spec import Variant
from optigpu.models.reference import BUNDLED, parse_reference


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
