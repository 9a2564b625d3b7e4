"""What a result says of where it comes from, and what is in its digests."""

from typing import Any

import pytest
from pydantic import ValidationError

from optigpu import __version__
from optigpu.conductor.outcome import provenance_of
from optigpu.documents.facts import RunFacts, TextQuality, WeightFacts
from optigpu.documents.result import Provenance
from optigpu.job.measured import measured
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant, digest
from optigpu.models.held import architecture_digest
from optigpu.models.reference import IMAGE_PRESETS, PRESETS
from tests.unit.test_attribution import HERE

ARCHITECTURES = {
    "gpt2": "5f2bf06b4816f3ba",
    "gpt2-medium": "a5916451df7fb68a",
    "gpt2-large": "67c37565b68297d6",
    "opt-125m": "e0c1c4348def5465",
    "llama-3.2-1b": "8f72c7d8578d35a0",
    "llama-3.1-8b": "36df6edc9b9ab7fb",
    "gpt-j-6b": "034930b57927a81b",
    "llama-3.1-70b": "2c4eec2541582865",
    "llama-3.1-405b": "221e3eb21d48a2d3",
    "llama-7b": "52c090e11fa8510e",
    "llama-2-13b": "666a9fe648b09fcb",
    "mistral-7b-v0.1": "6bc08fc31a22d1a4",
    "mistral-7b": "b37b41140818aa13",
    "qwen2.5-0.5b": "2c4ec6ee1e374de9",
    "tiny-llama-test": "24d29f6c1710e489",
    "tiny-gpt2-test": "fed8ee0b038b0f5a",
    "tiny-qwen-test": "e84a5996fdc46776",
    "resnet-50": "15d229b9ae92f408",
    "mobilenet-v2": "0d84d75ec78b771c",
    "mobilenet-v2-0.35-96": "2baaf9acd209cd92",
    "mobilenet-v2-1.0-224": "49c6ab7fcc58a9b2",
    "vit-base": "0a36dc1790302605",
    "tiny-resnet-test": "0c1a779c7a231aa0",
    "tiny-mobilenet-test": "de247d7c56dc03ee",
    "tiny-vit-test": "969379108e244614",
}
"""Digests of what the presets are. Results are compared by a preset's name, so its architecture never changes: another
architecture gets another name."""


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "path:gpt2"} | fields)


def variant(**fields: Any) -> Variant:
    return variants_of(spec(**fields))[0]


FILES = WeightFacts(hash="a" * 64, hash_of="files", reasons={"revision": "A directory."})
RECIPE = WeightFacts(hash="b" * 64, hash_of="recipe", revision="c" * 64)
OWN_TEXT = TextQuality(
    text="self",
    dataset=None,
    dataset_sha256=None,
    tokens_sha256="f" * 64,
    positions=512,
    kld_positions=512,
    window=64,
    stride=None,
    batch_size=1,
    contexts_cut=0,
)


def test_a_result_says_where_it_comes_from() -> None:
    environment = HERE.model_copy(update={"git_revision": "d" * 40, "git_dirty": False})
    quality = OWN_TEXT.model_copy(update={"dataset_sha256": "e" * 64})
    facts = RunFacts(weights=FILES, quality=quality)
    posted = spec(seed=7)
    found = provenance_of(posted, variants_of(posted)[0], environment, facts)
    assert found == Provenance(
        spec_digest=digest(posted.model_dump(mode="json")),
        seed=7,
        weight_hash="a" * 64,
        weight_hash_of="files",
        dataset_hash="e" * 64,
        optigpu_version=__version__,
        git_revision="d" * 40,
        git_dirty=False,
        reasons={"model_revision": "A directory."},
    )
    assert Provenance.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("facts", "model", "dataset"),
    [
        (RunFacts(), "did not record", "was not measured"),
        (RunFacts(quality=OWN_TEXT), "did not record", "wrote itself"),
    ],
)
def test_what_nobody_recorded_is_null_with_a_reason(facts: RunFacts, model: str, dataset: str) -> None:
    found = provenance_of(spec(), variant(), HERE, facts)
    assert (found.model_revision, found.weight_hash, found.weight_hash_of, found.dataset_hash) == (None,) * 4
    assert model in found.reasons["model_revision"]
    assert model in found.reasons["weight_hash"]
    assert dataset in found.reasons["dataset_hash"]
    assert "OPTIGPU_REVISION" in found.reasons["git_revision"]


def test_nothing_is_null_without_a_reason() -> None:
    whole = provenance_of(spec(), variant(), HERE, RunFacts(weights=FILES)).model_dump()
    reasons = {name: why for name, why in whole["reasons"].items() if name != "git_revision"}
    with pytest.raises(ValidationError, match="git_revision needs a value, or the reason"):
        Provenance.model_validate(whole | {"reasons": reasons})


def test_the_spec_s_digest_tells_any_two_specs_apart() -> None:
    variants = [spec(), spec(seed=1), spec(measure={"replicates": 9}), spec(model="path:other")]
    digests = {
        provenance_of(posted, variants_of(posted)[0], HERE, RunFacts()).spec_digest for posted in variants
    }
    assert len(digests) == len(variants)


def test_other_weights_under_the_same_name_are_another_workload() -> None:
    posted = variant()
    one, again, other = (
        measured(posted, provenance_of(spec(), posted, HERE, RunFacts(weights=weights)))
        for weights in (FILES, FILES, FILES.model_copy(update={"hash": "f" * 64}))
    )
    assert (one.workload_digest, one.digest) == (again.workload_digest, again.digest)
    assert len({posted.workload_digest, one.workload_digest, other.workload_digest}) == 3
    assert len({posted.digest, one.digest, other.digest}) == 3


def test_how_random_weights_were_drawn_is_in_no_digest() -> None:
    posted = variant(model="preset:gpt2")
    found = provenance_of(spec(model="preset:gpt2"), posted, HERE, RunFacts(weights=RECIPE))
    assert (found.weight_hash, found.weight_hash_of, found.model_revision) == ("b" * 64, "recipe", "c" * 64)
    assert measured(posted, found) == posted


def test_weights_that_could_not_be_hashed_leave_the_digests_as_they_were_posted() -> None:
    unknown = WeightFacts(revision="c" * 40, reasons={"hash": "The files are gone."})
    found = provenance_of(spec(), variant(), HERE, RunFacts(weights=unknown))
    assert (found.weight_hash, found.reasons["weight_hash"]) == (None, "The files are gone.")
    assert measured(variant(), found) == variant()


def test_a_preset_s_architecture_never_changes_under_its_name() -> None:
    presets = PRESETS | IMAGE_PRESETS
    assert {name: architecture_digest(preset)[:16] for name, preset in presets.items()} == ARCHITECTURES
