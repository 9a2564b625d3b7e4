"""What each kind of device has and lacks, what is refused there, and what a job needs of its worker."""

from types import SimpleNamespace
from typing import Any

import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.engine import allocation_failed
from optigpu.documents.result import Accelerator, Environment
from optigpu.documents.views import Want
from optigpu.hardware import hardware_class, probe
from optigpu.hardware.device_kinds import no_device
from optigpu.job.bench import bench_specs
from optigpu.job.plan import default_stack, needs_of
from optigpu.job.spec import JobSpec
from optigpu.measure import require_device
from optigpu.models.described import facts_of
from optigpu.models.reference import parse_reference
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import (
    BenchMode,
    DeviceKind,
    OptiGPUError,
    OutOfMemoryError,
    Precision,
    SpecError,
    UnsupportedError,
)
from optigpu.workloads.base import Workload
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from tests.unit.made_results import ENVIRONMENT

CPU, CUDA, ROCM, XPU, MPS = DeviceKind
EVERYWHERE = set(DeviceKind)


def machine(*gpus: Accelerator, driver: str | None = None, **software: str) -> Environment:
    return ENVIRONMENT.model_copy(update={"accelerators": gpus, "driver": driver, "software": software})


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
        ({"name": "activation_offload"}, MPS, "its memory is the host's; set target to disk."),
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


T4 = Accelerator(name="Tesla T4", memory_bytes=15 * 10**9, uuid="GPU-a")


def refusal(environment: Environment, **fields: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        require_device(asked(device="cuda", **fields), environment)
    return str(caught.value)


def test_a_driver_whose_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(CUDA_VISIBLE_DEVICES hides each)" in refusal(machine(driver="580.00"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "(its driver lists none)" in refusal(machine(driver="580.00"))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            {"gpu": "H100"},
            "target.gpu: this machine's GPU is Tesla T4, not H100; leave it out, or submit the job.",
        ),
        (
            {"min_vram_bytes": 16 * 10**9},
            "target.min_vram_bytes: this machine's GPU has 15000000000 bytes, fewer than",
        ),
    ],
)
def test_another_gpu_than_the_job_asks_for(target: dict[str, Any], words: str) -> None:
    assert refusal(machine(T4), target=target).startswith(words)


def test_what_fits_is_let_through() -> None:
    fitting = {"gpu": "t4", "min_vram_bytes": 15 * 10**9}
    require_device(asked(device="cuda", target=fitting), machine(T4, torch="2.13.0", torch_cuda="13.0"))


TORCH = (Want.BACKEND, "torch")


def needs(**fields: Any) -> list[tuple[Want, str]]:
    job = JobSpec.model_validate({"workload": {"kind": "generate"}, "model": "preset:gpt2"} | fields)
    return [(need.kind, need.name) for need in needs_of(job)]


BITSANDBYTES, GPTQMODEL = (Want.PACKAGE, "bitsandbytes"), (Want.PACKAGE, "gptqmodel")
DRAFTING = {"name": "speculative_decoding", "draft": "path:small"}


def model_of(name: str) -> tuple[Want, str]:
    return Want.MODEL, name


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"model": "preset:gpt2"}, []),
        ({"model": "bundled:tiny"}, []),
        ({"model": "path:mine/./gpt2"}, [model_of("path:mine/gpt2")]),
        ({"model": "openai-community/gpt2"}, [model_of("hub:openai-community/gpt2")]),
        ({"model": "path:large", "stack": [DRAFTING]}, [model_of("path:large"), model_of("path:small")]),
        ({"model": "path:small", "stack": [DRAFTING]}, [model_of("path:small")]),
        ({"stack": [{"name": "bf16"}, {"name": "nf4"}]}, [BITSANDBYTES]),
        ({"stack": [{"name": "gptq"}]}, [GPTQMODEL]),
        ({"model": "path:quantized", "stack": [{"name": "gptq"}]}, [model_of("path:quantized")]),
    ],
)
def test_a_job_needs_its_models_and_its_techniques_libraries(
    fields: dict[str, Any], needed: list[tuple[Want, str]]
) -> None:
    """A model that may be quantized already needs no library for that."""
    assert needs(**fields) == [TORCH, *needed]


@pytest.mark.slow
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


# ---- What all backends refuse alike, and how they say that memory is short.


def test_the_torch_backend_knows_each_way_in_which_torch_says_that_memory_is_short() -> None:
    torch = BACKENDS["torch"]
    named = type("OutOfMemoryError", (RuntimeError,), {})
    for error in (named("x"), RuntimeError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: no")):
        assert torch.is_out_of_memory(error)
    assert not torch.is_out_of_memory(RuntimeError("another"))
    assert torch.missing(SimpleNamespace()) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (Generate(), None),
        (Classify(), "coreml does not run the workload classify; it runs generate, quality."),
        (Generate(prompt="The old man"), "leave prompt, temperature and top_p out"),
        (Generate(temperature=1), "leave prompt, temperature and top_p out"),
    ],
)
def test_a_workload_that_is_refused_says_what_to_change(workload: Workload, said: str | None) -> None:
    found = BACKENDS["coreml"].supports(workload, None)
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("error", "ran_out"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("no room"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("Failed to allocate memory for requested buffer"), True),
        (RuntimeError("no such operator"), False),
        (OptiGPUError("no such file"), False),
    ],
)
def test_an_allocation_that_failed_is_told_from_other_errors(error: Exception, ran_out: bool) -> None:
    assert allocation_failed(error) is ran_out
