"""spec -> variants: their order, their roles, how many there may be; the jobs of `optigpu bench`."""

from typing import Any

import pytest

from optigpu.documents.result import Accelerator, Attribution, Gain, Verdict
from optigpu.hardware import probe
from optigpu.job.bench import bench_specs
from optigpu.job.plan import default_beside, default_stack, variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.report.tables import bench_line
from optigpu.selftest.checks import workload_for
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import BenchMode, DeviceKind, Precision, Role, SpecError, Task
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul
from tests.unit.made_results import a_rung, metric, result
from tests.unit.test_attribution import HERE as CPU

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
        ("single", "llama_cpp: gguf"),
        ("single", "half"),
        ("single", "llama_cpp: baseline"),
    ], "the same stack of the same backend is measured once"
    assert [variant.backend for variant in variants] == ["torch"] * 2 + ["llama_cpp"] * 3
    assert len({variant.workload_digest for variant in variants}) == 1, "they can be compared"
    assert len({variant.digest for variant in variants}) == 5


def test_stacks_that_differ_by_parameters_alone_are_called_by_them() -> None:
    def gguf(**parameters: str) -> dict[str, Any]:
        return {"backend": "llama_cpp", "stack": [{"name": "gguf"} | parameters]}

    fours = {"stack": [{"name": "native_decode", "weights": "w4", "group": 64}]}
    eights = {"stack": [{"name": "native_decode", "weights": "w8", "group": 64}]}
    beside = [gguf(), gguf(type="Q8_0"), gguf(type="F16") | {"label": "half"}, fours, eights]
    variants = planned("single", "bf16", beside=beside)
    assert [variant.label for variant in variants] == [
        "bf16",
        "llama_cpp: gguf(type=Q4_0)",
        "llama_cpp: gguf(type=Q8_0)",
        "half",
        "native_decode(weights=w4)",
        "native_decode(weights=w8)",
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
