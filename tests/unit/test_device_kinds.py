"""What each kind of device has and lacks, and what each technique therefore says of it. Nothing here needs a GPU."""

from typing import Any

import pytest

from optigpu.conductor.requirements import require_device
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import hardware_class
from optigpu.hardware.device_kinds import no_device
from optigpu.job.bench import bench_specs
from optigpu.job.plan import default_stack
from optigpu.job.spec import JobSpec
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import BenchMode, DeviceKind, Precision, SpecError, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.unit.made_results import ENVIRONMENT

CPU, CUDA, ROCM, XPU, MPS = DeviceKind
EVERYWHERE = set(DeviceKind)


def machine(*gpus: Accelerator, **software: str) -> Environment:
    return ENVIRONMENT.model_copy(update={"accelerators": gpus, "software": software})


def gpu(kind: DeviceKind, name: str = "GPU") -> Accelerator:
    return Accelerator(kind=kind, name=name, memory_bytes=2**34, uuid=f"{kind}-a")


def asked(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"workload": {"kind": "matmul"}} | fields)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_technique_states_every_kind(name: str) -> None:
    kind = TECHNIQUES[name]
    assert set(kind.devices) | set(kind.elsewhere()) == EVERYWHERE
    assert not set(kind.devices) & set(kind.elsewhere())
    assert kind.devices


@pytest.mark.parametrize(
    ("technique", "device", "words"),
    [
        (
            {"name": "torch_compile", "mode": "reduce-overhead"},
            XPU,
            "torch.xpu.XPUGraph; set mode to default.",
        ),
        ({"name": "torch_compile", "mode": "reduce-overhead"}, ROCM, None),
        ({"name": "torch_compile", "backend": "cudagraphs"}, XPU, "set backend to inductor."),
        (
            {"name": "fused_attention", "kernel": "flash"},
            ROCM,
            "chooses the attention kernel there; set kernel",
        ),
        ({"name": "fused_attention"}, MPS, None),
        ({"name": "activation_offload"}, MPS, "its memory is the host's; set target to disk."),
        ({"name": "activation_offload"}, XPU, None),
        (
            {"name": "mixed_precision", "dtype": "float16"},
            XPU,
            "needs float64, which the Arc A-Series has not",
        ),
        ({"name": "mixed_precision", "dtype": "float16"}, MPS, None),
        ({"name": "qlora", "base": "int4"}, ROCM, "in Triton for NVIDIA's GPUs; set base to nf4."),
    ],
)
def test_a_parameter_that_needs_more_is_refused_with_what_to_do(
    technique: dict[str, Any], device: DeviceKind, words: str | None
) -> None:
    every = machine(gpu(device), bitsandbytes="0.50", peft="0.19")
    made = TECHNIQUES[technique["name"]].model_validate(technique)
    reason = made.check(every, device, None)
    assert reason is None if words is None else words in str(reason)


def test_a_job_with_a_technique_that_is_not_for_its_device_is_refused_with_the_reason() -> None:
    job = {"workload": {"kind": "generate"}, "model": "preset:gpt2", "device": "mps"}
    with pytest.raises(SpecError, match="fp8 runs on cuda, not on mps: Metal's matrix products take no fp8"):
        JobSpec.model_validate(job | {"stack": [{"name": "fp8"}]})
    with pytest.raises(SpecError, match="backend: llama_cpp runs on cpu, not on mps"):
        JobSpec.model_validate(job | {"backend": "llama_cpp"})
    assert JobSpec.model_validate(job | {"stack": [{"name": "bf16"}]}).device is MPS


@pytest.mark.parametrize(
    ("device", "software", "why"),
    [
        (
            MPS,
            {"torch": "2.13.0"},
            "no Apple GPU that works (torch finds one on macOS with Apple Silicon alone, and",
        ),
        (
            XPU,
            {"torch": "2.13.0+cpu"},
            "no Intel GPU that works (torch 2.13.0+cpu here was not built for one); set",
        ),
        (
            ROCM,
            {"torch": "2.13.0", "torch_hip": "7.1"},
            "no AMD GPU that works (torch 2.13.0 here was built for one",
        ),
        (ROCM, {}, "no AMD GPU that works (torch is not installed); set device"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is(
    device: DeviceKind, software: dict[str, str], why: str
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        require_device(asked(device=device), machine(**software))
    assert str(caught.value).startswith(f"device: this machine has {why}")
    assert "set device to cpu, or submit the job" in str(caught.value)


def test_a_gpu_of_one_kind_is_none_of_another() -> None:
    both = machine(gpu(CUDA, "NVIDIA H200"), gpu(ROCM, "AMD Instinct MI300X"))
    assert [each.name for each in both.gpus(ROCM)] == ["AMD Instinct MI300X"]
    assert hardware_class(both, ROCM) == "1x AMD Instinct MI300X 16 GiB"
    assert hardware_class(both, CUDA) == "1x NVIDIA H200 16 GiB"
    assert [both.has(kind) for kind in DeviceKind] == [True, True, True, False, False]
    assert no_device(XPU, both).startswith("This machine has no Intel GPU that works")


def test_a_stored_gpu_without_a_kind_is_nvidia_s() -> None:
    assert Accelerator.model_validate({"name": "Tesla T4", "memory_bytes": 1, "uuid": "GPU-a"}).kind is CUDA


@pytest.mark.parametrize("device", [ROCM, XPU, MPS])
def test_a_default_stack_and_a_bench_hold_only_what_runs_there(device: DeviceKind) -> None:
    stack = default_stack(machine(gpu(device)), device, Generate(), "torch")
    assert stack
    assert all(device in technique.devices for technique in stack)
    for mode in BenchMode:
        specs = bench_specs(machine(gpu(device)), device, mode, Precision.INT8, "preset:tiny-gpt2-test")
        assert "tf32" not in specs[0].workload.model_dump()["dtypes"]
        beside = [technique for spec in specs for each in spec.beside for technique in each.stack]
        assert all(device in technique.devices for technique in beside)
