"""A job as it is posted, its digests, the variants that it becomes, and the jobs of `optigpu bench`."""

from typing import Any

import pytest

from optigpu.documents.fields import FieldsError
from optigpu.documents.result import Accelerator, Attribution, Gain, Verdict
from optigpu.hardware import probe
from optigpu.job.bench import bench_specs
from optigpu.job.plan import default_beside, default_stack, variants_of
from optigpu.job.spec import JobSpec, Variant, resolve
from optigpu.report.tables import bench_line
from optigpu.selftest.checks import workload_for
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import BenchMode, DeviceKind, Precision, Role, SpecError, Task
from optigpu.workloads import WORKLOADS
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul
from tests.engine.brought_kernels import HONEST
from tests.pages import LIBRARY, blocks
from tests.unit.made_results import a_rung, metric, result
from tests.unit.test_attribution import HERE as CPU

REQUIRED = {"kernel": {"kernel": HONEST}}
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


def test_a_short_limit_alone_also_lowers_the_least_time() -> None:
    assert spec(measure={"max_seconds": 2}).measure.min_seconds == 2
    assert spec().measure.min_seconds == 5
    with pytest.raises(FieldsError) as raised:
        spec(measure={"max_seconds": -1})
    assert "min_seconds" not in str(raised.value)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_every_workload_can_be_posted_as_it_is(kind: str) -> None:
    """And is read strictly, as the service reads what is posted: a number is no text, and every list is one."""
    workload = WORKLOADS[kind]
    model = workload.example_model if workload.task.needs_model else None
    posted = spec(workload={"kind": kind} | REQUIRED.get(kind, {}), model=model)
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
    assert [variant.label for variant in variants_of(posted)] == ["native_decode", "llama_cpp: gguf Q4_0"]


GPU = Accelerator(name="g", memory_bytes=1, uuid="u")


def planned(plan: str, *stack: str, **changes: Any) -> tuple[Variant, ...]:
    document = {"workload": {"kind": "generate"}, "model": "preset:gpt2", "plan": plan}
    named = [{"name": name} for name in stack]
    return variants_of(JobSpec.model_validate(document | {"stack": named} | changes))


def shown(variants: tuple[Variant, ...]) -> list[tuple[str, str]]:
    return [(variant.role.value, variant.label) for variant in variants]


def test_a_ladder_is_the_baseline_each_technique_alone_and_each_prefix() -> None:
    variants = planned("ladder", "bf16", "int8_weight_only", "static_kv_cache")
    assert shown(variants) == [
        ("baseline", "baseline"),
        ("alone", "bf16"),
        ("alone", "int8_weight_only"),
        ("alone", "static_kv_cache"),
        ("cumulative", "bf16 + int8_weight_only"),
        ("cumulative", "bf16 + int8_weight_only + static_kv_cache"),
    ]
    assert [variant.rung for variant in variants[-2:]] == ["int8_weight_only", "static_kv_cache"]
    assert [variant.index for variant in variants] == list(range(6))


def test_a_reference_is_measured_for_what_the_baseline_already_contains() -> None:
    assert shown(planned("ladder", "fused_attention"))[:2] == [
        ("baseline", "baseline"),
        ("reference", "eager_attention"),
    ]


def test_what_stands_for_two_things_is_measured_once() -> None:
    stacks = [variant.stack for variant in planned("ladder", "static_kv_cache", "torch_compile")]
    assert len(stacks) == len(set(stacks)) == 3
    grid = [variant.label for variant in planned("grid", "static_kv_cache", "torch_compile")]
    assert grid == ["baseline", "static_kv_cache", "static_kv_cache + torch_compile"]


def test_a_workload_of_many_shapes_is_measured_shape_by_shape() -> None:
    document = {"workload": {"kind": "matmul", "sizes": [64, 128, 64], "dtypes": ["float32", "bfloat16"]}}
    variants = variants_of(JobSpec.model_validate(document))
    assert [variant.label for variant in variants] == [
        "float32 64",
        "float32 128",
        "bfloat16 64",
        "bfloat16 128",
    ]
    assert len({variant.workload_digest for variant in variants}) == 4


def test_stacks_of_other_backends_are_measured_beside_the_plan_s_own() -> None:
    q4 = {"backend": "llama_cpp", "stack": [{"name": "gguf"}]}
    beside = [q4, {"backend": "llama_cpp", "stack": [{"name": "gguf", "type": "F16"}], "label": "half"}]
    variants = planned("ladder", "bf16", beside=[*beside, {"backend": "llama_cpp"}, {}, q4])
    assert shown(variants) == [
        ("baseline", "baseline"),
        ("alone", "bf16"),
        ("single", "llama_cpp: gguf Q4_0"),
        ("single", "half"),
        ("single", "llama_cpp: baseline"),
    ], "the same stack of the same backend is measured once"
    assert [variant.backend for variant in variants] == ["torch"] * 2 + ["llama_cpp"] * 3
    assert len({variant.workload_digest for variant in variants}) == 1, "they can be compared"
    assert len({variant.digest for variant in variants}) == 5


def test_stacks_that_differ_by_parameters_alone_are_called_by_them() -> None:
    def gguf(**parameters: object) -> dict[str, Any]:
        return {"backend": "llama_cpp", "stack": [{"name": "gguf"} | parameters]}

    fours = {"stack": [{"name": "native_decode", "weights": "w4", "group": 64}]}
    eights = {"stack": [{"name": "native_decode", "weights": "w8", "group": 64}]}
    beside = [gguf(), gguf(type="Q8_0"), gguf(type="F16") | {"label": "half"}, fours, eights]
    beside += [gguf(type="Q4_K_M"), gguf(type="Q4_K_M", pure=True)]
    variants = planned("single", "bf16", beside=beside)
    assert [variant.label for variant in variants] == [
        "bf16",
        "llama_cpp: gguf Q4_0",
        "llama_cpp: gguf Q8_0",
        "half",
        "native_decode(weights=w4)",
        "native_decode(weights=w8)",
        "llama_cpp: gguf Q4_K_M(pure=false)",
        "llama_cpp: gguf Q4_K_M(pure=true)",
    ], "what they share is left out"


@pytest.mark.parametrize(
    "beside",
    [
        [{"stack": [{"name": "bf16"}], "label": "mine"}, {"stack": [{"name": "fp16"}], "label": "mine"}],
        [{"stack": [{"name": "bf16"}], "label": "baseline"}],
        [{"stack": [{"name": "fp16"}], "label": "bf16"}, {"stack": [{"name": "bf16"}]}],
    ],
)
def test_a_label_that_another_variant_has_is_refused(beside: list[dict[str, Any]]) -> None:
    with pytest.raises(SpecError, match=r"^beside: the label '\w+' is another variant's as well"):
        planned("single", beside=beside)


def test_more_variants_than_the_limit_are_refused() -> None:
    stack = ("bf16", "int8_weight_only", "static_kv_cache", "fused_attention")
    assert len(planned("grid", *stack, limits={"max_variants": 16})) == 16
    with pytest.raises(SpecError, match=r"limits\.max_variants"):
        planned("grid", *stack, limits={"max_variants": 15})
    with pytest.raises(SpecError, match=r"limits\.max_variants"):
        planned(
            "grid", workload={"kind": "matmul", "sizes": [1, 2, 3]}, model=None, limits={"max_variants": 2}
        )


def test_a_default_stack_holds_what_suits_the_device() -> None:
    for environment, device in (
        (CPU, DeviceKind.CPU),
        (CPU.model_copy(update={"accelerators": (GPU,)}), DeviceKind.CUDA),
    ):
        stack = default_stack(environment, device, Generate(), "torch")
        assert stack
        assert all(technique.check(environment, device, None) is None for technique in stack)
        assert not any(technique.cautionary for technique in stack)
    names = [technique.name for technique in default_stack(CPU, DeviceKind.CPU, Generate(), "torch")]
    assert "torch_compile" not in names, "without a compiler it cannot run on a CPU"
    assert default_stack(CPU, DeviceKind.CPU, Matmul(), "torch") == ()


@pytest.mark.parametrize(
    ("model", "calibration"), [("preset:gpt2", "none"), ("bundled:tiny", "self"), ("hub:org/model", "self")]
)
def test_what_excludes_the_others_is_measured_beside_them(model: str, calibration: str) -> None:
    environment = CPU.model_copy(update={"compiler": "g++ 12"})
    (beside,) = default_beside(environment, DeviceKind.CPU, Generate(), "torch", model)
    (technique,) = beside.stack
    assert technique.name == "native_decode"
    assert technique.model_dump()["calibration"] == calibration, "random weights gain nothing by it"
    planned("ladder", model=model, beside=[beside.model_dump(mode="json")])


def test_nothing_is_beside_a_stack_where_it_cannot_run() -> None:
    assert default_beside(CPU, DeviceKind.CPU, Generate(), "torch", "preset:gpt2") == (), "no compiler"
    compiler = CPU.model_copy(update={"compiler": "g++ 12"})
    assert default_beside(compiler, DeviceKind.CPU, Matmul(), "torch", None) == ()
    assert default_beside(compiler, DeviceKind.CPU, Generate(), "llama_cpp", "preset:gpt2") == ()


def test_every_technique_can_be_the_stack_of_a_ladder() -> None:
    for name, kind in TECHNIQUES.items():
        workload = workload_for(kind(name=name)).model_dump(mode="json")
        on = {"device": kind.devices[0], "backend": kind.backends[0], "workload": workload}
        if kind.tasks == (Task.IMAGES,):
            on["model"] = "preset:resnet-50"
        variants = planned("ladder", name, **on)
        assert any(variant.rung == name for variant in variants)


GPT2 = "preset:gpt2"


def labels(mode: BenchMode, precision: Precision) -> list[str]:
    *_, decoding = bench_specs(probe(), DeviceKind.CPU, mode, precision, GPT2)
    return [variant.label for variant in variants_of(decoding)]


def test_a_quick_bench_decodes_with_the_baseline_and_our_decoder() -> None:
    assert labels(BenchMode.QUICK, Precision.INT4) == ["baseline", "native_decode"]
    assert labels(BenchMode.QUICK, Precision.FP32) == ["baseline"]


@pytest.mark.parametrize("device", list(DeviceKind))
@pytest.mark.parametrize("mode", list(BenchMode))
def test_every_mode_has_products_attention_and_decoding(device: DeviceKind, mode: BenchMode) -> None:
    specs = bench_specs(probe(), device, mode, Precision.INT8, GPT2)
    assert [spec.workload.kind for spec in specs] == ["matmul", "attention", "generate"]
    assert all(spec.tags == ("bench", mode) and spec.device is device for spec in specs)


def test_a_model_that_does_not_decode_is_refused() -> None:
    with pytest.raises(SpecError, match="classifies images"):
        bench_specs(probe(), DeviceKind.CPU, BenchMode.QUICK, Precision.INT4, "preset:resnet-50")


def decoded(index: int, label: str, rate: float) -> dict[str, Any]:
    metrics = {"tokens_per_s": metric("tokens_per_s", rate, (rate * 0.9, rate * 1.1))}
    document: dict[str, Any] = result(index, Role.SINGLE, label, metrics, Verdict(valid=True)).model_dump(
        mode="json"
    )
    return document


def test_the_line_has_the_best_figure_with_its_gain_and_its_origin() -> None:
    gain = Gain(ratio=20.04, ci=(18.0, 22.0), compared_with=0)
    rows = (
        a_rung(0, "baseline", Role.BASELINE),
        a_rung(1, "native_decode", Role.SINGLE, speedup=gain),
    )
    results = [decoded(0, "baseline", 30.0), decoded(1, "native_decode", 601.0)]
    nothing = Attribution(metric="tflops", rows=())
    line = bench_line([(results, Attribution(metric="tokens_per_s", rows=rows, best=1)), ([], nothing)])
    assert "native_decode: 601 ±60 tokens/s, 20.0x the baseline. Measured " in line
    assert "Test CPU" in line
