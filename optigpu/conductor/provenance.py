"""The provenance of a result: the exact model, data and code of a variant."""

from optigpu import __version__
from optigpu.documents.facts import (
    NO_MODEL,
    NOT_RECORDED,
    ImageQuality,
    LossQuality,
    RunFacts,
    TextQuality,
    WeightFacts,
)
from optigpu.documents.result import Environment, Provenance
from optigpu.job.spec import JobSpec, Variant, digest

NO_QUALITY = "Quality was not measured."
MADE_IMAGES = "Quality was measured on images that were made from the seed; facts.quality.of says how."
MADE_SAMPLES = "The losses of training are those of samples that were made from the seed."
OWN_TEXT = "Quality was measured on a text that the fp32 model wrote itself; facts.quality.tokens_sha256 is its hash."
NO_CHECKOUT = (
    "The commit is not known: the code runs outside a git checkout, and OPTIGPU_REVISION is not set."
)


def provenance_of(spec: JobSpec, variant: Variant, environment: Environment, facts: RunFacts) -> Provenance:
    """The provenance of a measured variant, from what its first process and its meters recorded.

    What was not recorded is null, with the reason.
    """
    weights, quality = facts.weights or _no_weights(variant), facts.quality
    read = facts.pictures.sha256 if facts.pictures else None
    dataset = read or (quality.dataset_sha256 if isinstance(quality, TextQuality | ImageQuality) else None)
    values = {
        "model_revision": weights.revision,
        "weight_hash": weights.hash,
        "dataset_hash": dataset,
        "git_revision": environment.git_revision,
    }
    reasons = {
        "model_revision": weights.reasons.get("revision", NOT_RECORDED),
        "weight_hash": weights.reasons.get("hash", NOT_RECORDED),
        "dataset_hash": _no_dataset(quality),
        "git_revision": NO_CHECKOUT,
    }
    return Provenance(
        **values,
        spec_digest=digest(spec.model_dump(mode="json")),
        seed=spec.seed,
        weight_hash_of=weights.hash_of,
        optigpu_version=__version__,
        git_dirty=environment.git_dirty,
        reasons={name: reasons[name] for name, value in values.items() if value is None},
    )


def _no_weights(variant: Variant) -> WeightFacts:
    why = NOT_RECORDED if variant.model else NO_MODEL
    return WeightFacts(reasons={"hash": why, "revision": why})


def _no_dataset(quality: TextQuality | ImageQuality | LossQuality | None) -> str:
    if isinstance(quality, ImageQuality):
        return MADE_IMAGES
    if isinstance(quality, LossQuality):
        return MADE_SAMPLES
    return NO_QUALITY if quality is None else OWN_TEXT
