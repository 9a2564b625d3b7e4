"""A job as it is posted: what is refused and how, and the digests that make results comparable."""

from typing import Any

import pytest

from optigpu.documents.fields import FieldsError
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant, resolve
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, SpecError
from optigpu.workloads import WORKLOADS
from tests.pages import LIBRARY, blocks

BASE: dict[str, Any] = {"workload": {"kind": "generate"}, "model": "preset:gpt2"}

# Digests of stored results. A change of these makes every earlier result a stranger to every later one.
GOLDEN_WORKLOAD = "2b99484094a68d9c99a3dde1c52ccd1be0448df6ec429639be76ea393b379a50"
GOLDEN_VARIANT = "89798a274f9b65f595307ff3d5dce22657e201598a67fa31791d46a500151d6f"


def spec(**changes: Any) -> JobSpec:
    return JobSpec.model_validate(BASE | changes)


def only(**changes: Any) -> Variant:
    (variant,) = variants_of(spec(**changes))
    return variant


def stack(*names: str) -> list[dict[str, str]]:
    return [{"name": name} for name in names]


def generate(**shapes: Any) -> dict[str, Any]:
    return {"kind": "generate"} | shapes


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"stack": stack("bf16") * 17}, "stack", ["16"]),
        ({"limits": {"max_kld": -1}}, "limits.max_kld", []),
        (
            {"limits": {"max_kld": 0.1}, "model": "path:x", "measure": {"meters": ["latency"]}},
            "",
            ["limits", "meter 'quality'"],
        ),
        ({"model": "hub:../../etc"}, "model", ["ORG/NAME"]),
        ({"model": "path:/etc"}, "model", ["model directory"]),
        ({"workload": generate(new_tokens=1)}, "workload.new_tokens", ["2"]),
        (
            {"workload": {"kind": "matmul", "sizes": [10**6]}, "model": None},
            "workload.sizes.0",
            ["65536"],
        ),
        (
            {"model": "preset:resnet-50"},
            "",
            ["model:", "preset:resnet-50 classifies images", "generate", "preset:gpt2"],
        ),
        (
            {"workload": {"kind": "classify", "image_size": 256}, "model": "preset:vit-base"},
            "",
            ["workload:", "256", "224"],
        ),
        (
            {"workload": {"kind": "kv_cache", "positions": [8, 1020]}},
            "",
            ["workload:", "1036", "1024 tokens"],
        ),
        (
            {"workload": {"kind": "quality"}, "model": "bundled:tiny", "measure": {"meters": ["latency"]}},
            "",
            ["measure.meters", "'quality'"],
        ),
        ({"stack": stack("torch_compile", "no_kv_cache")}, "", ["stack:", "exclude"]),
        (
            {"backend": "llama_cpp", "stack": stack("bf16")},
            "",
            ["bf16 is for the backend torch", "llama_cpp"],
        ),
        (
            {"stack": stack("gguf")},
            "",
            ["stack:", "gguf is for the backend llama_cpp, ik_llama_cpp, not for torch"],
        ),
        ({"stack": [{"name": "gguf", "type": "Q2_X"}]}, "stack.0.type", ["Q4_0", "Q8_0"]),
        (
            {"workload": {"kind": "prefill"}, "beside": [{}, {}, {"backend": "llama_cpp"}]},
            "",
            ["beside.2.backend: llama_cpp does not run the workload prefill"],
        ),
        ({"measure": {"max_seconds": float("inf")}}, "measure.max_seconds", []),
    ],
)
def test_bad_input_is_refused_with_its_field_and_what_is_valid(
    changes: dict[str, Any], field: str, words: list[str]
) -> None:
    with pytest.raises(FieldsError) as raised:
        spec(**changes)
    said = [each for each in str(raised.value).splitlines() if each.startswith(f"{field}:" if field else "")]
    assert any(all(word in each for word in words) for each in said), str(raised.value)
    assert "pydantic" not in str(raised.value)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_every_workload_can_be_posted_as_it_is(kind: str) -> None:
    """And is read strictly, as the service reads what is posted: a number is no text, and every list is one."""
    workload = WORKLOADS[kind]
    model = workload.example_model if workload.task.needs_model else None
    posted = spec(workload={"kind": kind}, model=model)
    assert JobSpec.model_validate_json(posted.model_dump_json(), strict=True) == posted
    variants = variants_of(posted)
    assert len({variant.digest for variant in variants}) == len(variants)
    implementations = {variant.workload.implementation for variant in variants}
    assert len({variant.workload_digest for variant in variants}) * len(implementations) == len(variants)


def test_a_bare_model_name_is_a_hub_name() -> None:
    assert spec(model="openai-community/gpt2").model == "hub:openai-community/gpt2"


def test_the_golden_digests() -> None:
    variant = only(stack=stack("bf16", "torch_compile"))
    assert (variant.workload_digest, variant.digest) == (GOLDEN_WORKLOAD, GOLDEN_VARIANT)


@pytest.mark.parametrize(
    "changes",
    [
        {"measure": {"replicates": 9, "rel_ci": 0.5}},
        {"limits": {"timeout_s": 60}},
        {"seed": 5},
        {"name": "A first look", "tags": ["paper"], "note": "With the new fan."},
        {"stack": stack("torch_compile", "static_kv_cache", "bf16")},
        {"plan": "ladder"},
    ],
)
def test_how_and_why_it_is_asked_for_is_in_no_digest(changes: dict[str, Any]) -> None:
    variant = variants_of(spec(**{"stack": stack("bf16", "torch_compile")} | changes))[-1]
    assert (variant.workload_digest, variant.digest) == (GOLDEN_WORKLOAD, GOLDEN_VARIANT)
    assert only(device="cuda", target={"gpu": "H200"}).digest == only(device="cuda").digest


def test_what_is_measured_is_in_its_digests() -> None:
    plain = only()
    others = [
        only(stack=stack("bf16")),
        only(stack=[{"name": "torch_compile"}]),
        only(stack=[{"name": "torch_compile", "mode": "max-autotune"}]),
        only(device="cuda"),
    ]
    assert len({variant.digest for variant in (plain, *others)}) == 5
    assert {variant.workload_digest for variant in others} == {plain.workload_digest}
    elsewhere = [only(workload=generate(new_tokens=7)), only(model="preset:opt-125m")]
    assert len({variant.workload_digest for variant in (plain, *elsewhere)}) == 3
    assert len({variant.digest for variant in (plain, *elsewhere)}) == 3


def test_a_technique_s_new_version_is_another_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TECHNIQUES["bf16"], "version", 2)
    assert only(stack=stack("bf16", "torch_compile")).digest != GOLDEN_VARIANT


def test_what_is_required_comes_along_in_the_order_of_the_phases() -> None:
    techniques = [TECHNIQUES[name](name=name) for name in ("torch_compile", "int8_weight_only", "bf16")]
    assert [technique.name for technique in resolve(techniques, "generate")] == [
        "bf16",
        "int8_weight_only",
        "static_kv_cache",
        "torch_compile",
    ]


def test_a_technique_that_does_not_run_on_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TECHNIQUES["bf16"], "devices", (DeviceKind.CUDA,))
    with pytest.raises(SpecError, match="bf16 runs on cuda, not on cpu"):
        spec(stack=stack("bf16"))


def test_the_documented_job_beside_llama_cpp_can_be_posted() -> None:
    (text,) = blocks(LIBRARY, "json")
    posted = JobSpec.model_validate_json(text)
    assert [variant.label for variant in variants_of(posted)] == ["native_decode", "llama_cpp: gguf"]
