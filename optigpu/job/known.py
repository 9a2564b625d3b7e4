"""What can be known of a variant's digests before anything is read where it is measured."""

import hashlib
from functools import lru_cache

from optigpu.job.spec import Variant
from optigpu.models.bundled import BUNDLED
from optigpu.models.reference import parse_reference


def as_measured(variant: Variant) -> Variant | None:
    """The variant as its result has it, whose digests contain the hash of what its weights were read from.

    None where only who reads the files can know them: those of the hub and of folders may change under their names, as
    may labelled images and whatever a server serves.
    """
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
