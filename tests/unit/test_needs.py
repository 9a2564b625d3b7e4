"""What a job asks for of the worker that takes it, from its request alone."""

from typing import Any

import pytest

from optigpu.documents.views import Want
from optigpu.hardware import probe
from optigpu.job.needs import Need, needs_of
from optigpu.job.spec import JobSpec
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques import TECHNIQUES

TORCH = (Want.BACKEND, "torch")


def needs(**fields: Any) -> list[tuple[Want, str]]:
    job = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "preset:gpt2"} | fields)
    return [(need.kind, need.name) for need in needs_of(job)]


@pytest.mark.parametrize("model", ["preset:gpt2", "bundled:tiny"])
def test_presets_and_bundled_models_are_everywhere(model: str) -> None:
    assert needs(model=model) == [TORCH]


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("path:mine/./gpt2", "path:mine/gpt2"),
        ("openai-community/gpt2", "hub:openai-community/gpt2"),
        ("hub:openai-community/gpt2@main", "hub:openai-community/gpt2@main"),
    ],
)
def test_other_models_are_needed_by_their_reference(model: str, reference: str) -> None:
    assert needs(model=model) == [TORCH, (Want.MODEL, reference)]


def test_a_draft_is_a_model_as_well_and_the_same_one_counts_once() -> None:
    drafting = {"name": "speculative_decoding", "draft": "path:small"}
    assert needs(model="path:large", stack=[drafting]) == [
        TORCH,
        (Want.MODEL, "path:large"),
        (Want.MODEL, "path:small"),
    ]
    assert needs(model="path:small", stack=[drafting]) == [TORCH, (Want.MODEL, "path:small")]
    assert needs(stack=[drafting | {"draft": "bundled:tiny"}]) == [TORCH]


@pytest.mark.parametrize("name", ["nf4", "llm_int8"])
def test_a_technique_s_library_is_needed(name: str) -> None:
    assert needs(stack=[{"name": "bf16"}, {"name": name}]) == [TORCH, (Want.PACKAGE, "bitsandbytes")]


def test_gptq_needs_its_library_unless_the_model_may_be_quantized_already() -> None:
    assert needs(stack=[{"name": "gptq"}]) == [TORCH, (Want.PACKAGE, "gptqmodel")]
    assert needs(model="path:quantized", stack=[{"name": "gptq"}]) == [TORCH, (Want.MODEL, "path:quantized")]


def test_another_backend_is_needed_by_its_name() -> None:
    assert needs(backend="llama_cpp", model="bundled:tiny") == [(Want.BACKEND, "llama_cpp")]


@pytest.mark.parametrize(
    ("need", "words"),
    [
        (Need(kind=Want.PACKAGE, name="bitsandbytes"), "pip install -e '.[quant]'"),
        (Need(kind=Want.PACKAGE, name="gptqmodel"), "pip install -e '.[gptq]'"),
        (Need(kind=Want.PACKAGE, name="of_an_older_version"), "pip install of_an_older_version"),
        (Need(kind=Want.DEVICE, name="cuda"), "python -m worker --device cuda"),
        (Need(kind=Want.MODEL, name="path:mine"), "Put the folder there"),
        (Need(kind=Want.MODEL, name="hub:theirs"), "without HF_HUB_OFFLINE"),
    ],
)
def test_each_need_has_a_next_step(need: Need, words: str) -> None:
    assert words in need.next_step


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_whose_package_is_missing_says_so_where_it_runs(name: str) -> None:
    """What a job waits for and what a variant is refused for are the same packages."""
    bare = probe().model_copy(update={"software": {}})
    technique = TECHNIQUES[name](name=name)
    facts = facts_of(parse_reference("preset:llama-3.2-1b"))
    for known in (None, facts):
        packages = technique.packages(known)
        reason = technique.check(bare, technique.devices[0], known)
        assert not packages or f"{packages[0]} is not installed" in str(reason)
