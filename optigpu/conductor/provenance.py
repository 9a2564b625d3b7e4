"""What exactly a variant was: where its model, its data and the code that measured it come from."""

from collections.abc import Mapping
from typing import Any

from optigpu import __version__
from optigpu.documents.result import Environment, Provenance
from optigpu.job.spec import JobSpec, Variant, digest

NO_MODEL = "The workload runs no model."
NOT_RECORDED = "The measuring process did not record it."
NO_QUALITY = "Quality was not measured."
MADE_IMAGES = "Quality was measured on images that were made from the seed; details.quality.of says how."
OWN_TEXT = "Quality was measured on a text that the fp32 model wrote itself; details.quality.tokens_sha256 is its hash."
NO_CHECKOUT = (
    "The code runs from no checkout that git can read, and OPTIGPU_REVISION does not say its commit."
)


def provenance_of(
    spec: JobSpec, variant: Variant, environment: Environment, details: Mapping[str, Any]
) -> Provenance:
    """The provenance of a measured variant, from the details that its first process and its meters recorded.

    `details["weights"]` is what `weights_provenance` of optigpu.models.loading.weights gave, and
    `details["quality"]` what the quality meter did. What neither says is null, with the reason.
    """
    weights: Mapping[str, Any] = details.get("weights") or {}
    quality: Mapping[str, Any] = details.get("quality") or {}
    unknown = NOT_RECORDED if variant.model else NO_MODEL
    values = {
        "model_revision": weights.get("revision"),
        "weight_hash": weights.get("hash"),
        "dataset_hash": quality.get("dataset_sha256"),
        "git_revision": environment.git_revision,
    }
    reasons = {"model_revision": unknown, "weight_hash": unknown} | dict(weights.get("reasons") or {})
    reasons |= {"dataset_hash": _no_dataset(quality), "git_revision": NO_CHECKOUT}
    return Provenance(
        **values,
        spec_digest=digest(spec.model_dump(mode="json")),
        seed=spec.seed,
        weight_hash_of=weights.get("hash_of"),
        optigpu_version=__version__,
        git_dirty=environment.git_dirty,
        reasons={name: reasons[name] for name, value in values.items() if value is None},
    )


def _no_dataset(quality: Mapping[str, Any]) -> str:
    if "images" in quality:
        return MADE_IMAGES
    return OWN_TEXT if quality else NO_QUALITY


def measured(variant: Variant, provenance: Provenance) -> Variant:
    """The variant with the hash of the files that its weights came from, which its digests then contain.

    Random weights leave it as it was: they are the same thing to measure whichever seed or library drew them.
    """
    if provenance.weight_hash_of != "files":
        return variant
    return variant.model_copy(update={"weights": provenance.weight_hash})
