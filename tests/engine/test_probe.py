"""What this machine is, from itself and from files of other machines; AMD's, Intel's and Apple's GPUs without one."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from torch.profiler import ProfilerActivity

from optigpu.backends.torch.attention import activities_of
from optigpu.backends.torch.device import CpuClock, is_there, kind_of, module_of, peaks_of, require
from optigpu.backends.torch.profile import Recording
from optigpu.documents.result import Accelerator
from optigpu.hardware import cpu, gpu, probe
from optigpu.hardware.cgroup import cpu_quota, memory_limit, oom_kills
from optigpu.hardware.device_kinds import KINDS
from optigpu.hardware.gpu import OfHost, built_for, of_answer
from optigpu.hardware.probe import probed
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.engine.machines import tree

EPYC = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: {}\nflags\t\t: fpu avx2 fma sse\n"


def test_this_machine() -> None:
    here = probe()
    assert here.hardware_class
    assert 1 <= here.cpu_cores <= (os.cpu_count() or 1)
    assert 0 < here.memory_bytes <= psutil.virtual_memory().total
    assert set(here.cpu_features) <= set(cpu.FEATURES)
    assert {"python", "torch", "transformers", "numpy"} <= set(here.software)
    assert here.os
    assert re.fullmatch(r"[0-9a-f]{16}", here.hardware_fingerprint or "")
    assert re.fullmatch(r"[0-9a-f]{16}", here.software_fingerprint or "")
    assert here.host_id_source
    assert probe() == here


def test_the_hardware_is_asked_again_when_other_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    assert probe().accelerators == (H200,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-hidden")
    assert probe().accelerators == ()


@pytest.mark.slow
def test_the_cuda_that_torch_was_built_with_is_read_without_loading_torch(tmp_path: Path) -> None:
    version = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
    tree(tmp_path, **{"torch__version.py": version})
    (tmp_path / "torch/__init__.py").write_text("raise ImportError\n")
    code = "from optigpu.hardware import probe; print(probe().software['torch_cuda'])"
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
    assert answer.stdout == b"13.0\n"


def test_a_host_has_an_id_that_gives_nothing_away() -> None:
    here = probe()
    assert re.fullmatch(r"[0-9a-f]{16}", here.host_id)
    machine_id = Path("/etc/machine-id")
    if machine_id.is_file() and machine_id.read_text().strip():
        assert here.host_id not in machine_id.read_text()
    assert os.uname().nodename not in here.model_dump_json()


@pytest.mark.parametrize(
    ("named", "model"),
    [
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763"),
        ("Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz", "Intel Xeon Platinum 8375C"),
        ("AMD EPYC", "AMD EPYC (family 25 model 1)"),
    ],
)
def test_a_cpu_model_is_its_name_without_frills(tmp_path: Path, named: str, model: str) -> None:
    assert cpu.cpu_model(tree(tmp_path, proc__cpuinfo=EPYC.format(named))) == model


def test_features_are_those_that_matter_under_the_kernel_s_names(tmp_path: Path) -> None:
    assert cpu.cpu_features(tree(tmp_path, proc__cpuinfo=EPYC.format("x"))) == ("avx2", "fma")
    assert not cpu.has_onednn_bfloat16(tmp_path)
    arm = "processor\t: 0\nFeatures\t: fp asimd sve bf16 i8mm\nCPU implementer\t: 0x41\n"
    assert cpu.cpu_features(tree(tmp_path, proc__cpuinfo=arm)) == ("asimd", "i8mm", "bf16", "sve")
    assert cpu.has_onednn_bfloat16(tmp_path)
    wide = EPYC.format("x").replace("avx2", "avx2 avx512f avx512bw")
    assert cpu.has_onednn_bfloat16(tree(tmp_path, proc__cpuinfo=wide))
    assert not cpu.has_vnni(tmp_path)
    assert cpu.has_vnni(tree(tmp_path, proc__cpuinfo=wide.replace("avx512bw", "avx512bw avx512_vnni")))


def test_siblings_are_one_core_and_a_quota_is_respected(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    for number in allowed:
        tree(tmp_path, **{f"sys__devices__system__cpu__cpu{number}__topology__thread_siblings_list": "0-127"})
    assert cpu.cpu_cores(tmp_path) == 1
    assert cpu.one_cpu_of_each_core(tmp_path) == allowed[:1]
    assert cpu.one_cpu_of_each_core(tmp_path / "nothing is told") == allowed
    quota = tree(tmp_path, proc__self__cgroup="0::/\n") / "sys/fs/cgroup/cpu.max"
    quota.parent.mkdir(parents=True)
    quota.write_text("50000 100000\n")
    assert cpu.cpu_cores(tmp_path) == 1, "half a core is still one"


def test_limits_of_control_groups_of_version_2(tmp_path: Path) -> None:
    tree(tmp_path, proc__self__cgroup="0::/a/b\n", proc__vmstat="pgfault 5\noom_kill 2\n")
    groups = {"a/b": ("max", "max 100000"), "a": ("1000", "150000 100000"), "": ("2000", "max 100000")}
    for path, (memory, processor) in groups.items():
        folder = tmp_path / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{memory}\n")
        (folder / "cpu.max").write_text(f"{processor}\n")
    (tmp_path / "sys/fs/cgroup/a/b/memory.events").write_text("oom 4\noom_kill 3\n")
    assert memory_limit(tmp_path) == 1000
    assert cpu_quota(tmp_path) == 1.5
    assert oom_kills(tmp_path) == 5


def test_limits_of_control_groups_of_version_1(tmp_path: Path) -> None:
    tree(tmp_path, proc__self__cgroup="4:memory:/a\n3:cpu,cpuacct:/a\n0::/\n")
    memory, processor = tmp_path / "sys/fs/cgroup/memory/a", tmp_path / "sys/fs/cgroup/cpu,cpuacct/a"
    for folder in (memory, processor):
        folder.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text("4096\n")
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    (processor / "cpu.cfs_quota_us").write_text("200000\n")
    (processor / "cpu.cfs_period_us").write_text("100000\n")
    assert memory_limit(tmp_path) == 4096
    assert cpu_quota(tmp_path) == 2
    assert oom_kills(tmp_path) == 1
    (processor / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_quota(tmp_path) is None


GPUS = [Accelerator(name="g", memory_bytes=1, uuid=f"GPU-{letter}") for letter in "abc"]


@pytest.mark.parametrize(
    ("chosen", "uuids"),
    [
        (None, "abc"),
        ("", ""),
        ("2,0", "ca"),
        ("GPU-b", "b"),
        ("GPU-", ""),
        ("1,9,0", "b"),
        ("-1", ""),
        ("0, 1", "ab"),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(chosen: str | None, uuids: str) -> None:
    assert [found.uuid for found in gpu.visible(GPUS, chosen)] == [f"GPU-{letter}" for letter in uuids]


def answering(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """A driver with one GPU that gives these answers."""
    common = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 1,
        "nvmlSystemGetDriverVersion": "570.1",
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetMigMode": (0, 0),
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetUUID": "GPU-a",
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=143771 * 2**20),
    }
    for name, answer in (common | answers).items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


H200 = Accelerator(name="NVIDIA H200", memory_bytes=143771 * 2**20, uuid="GPU-a", compute_capability="9.0")


def test_what_a_driver_says_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(
        monkeypatch,
        nvmlSystemGetCudaDriverVersion=12080,
        nvmlDeviceGetEnforcedPowerLimit=650_500,
        nvmlDeviceGetPersistenceMode=1,
    )
    clocks = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", lambda _, kind: clocks[kind])
    setup = {
        "clock_max_hz": 1_980_000_000,
        "memory_clock_max_hz": 3_201_000_000,
        "power_limit_w": 650.5,
        "persistence_mode": True,
    }
    h200 = H200.model_copy(update=setup)
    assert gpu.gpus() == gpu.Gpus((h200,), ("GPU-a",), "570.1", "12.8")
    here = probed(Path("/"))
    assert (here.hardware_class, here.driver, here.cuda) == ("1x NVIDIA H200 140 GiB", "570.1", "12.8")


@pytest.mark.gpu
def test_a_gpu_is_named_by_its_driver() -> None:
    here = probe()
    assert here.driver
    assert re.fullmatch(r"(\d+x .+ \d+ GiB)( \+ .*)?", here.hardware_class)
    first = here.accelerators[0]
    assert first.compute_capability
    assert here.cuda
    assert 10**8 < (first.clock_max_hz or 0) < 10**10
    assert 1 < (first.power_limit_w or 0) < 10_000


CPU, CUDA, ROCM, XPU, MPS = DeviceKind
MAC = OfHost("f00d", "Apple M2 Pro", 16 * 2**30)
ANSWERS = {
    ROCM: """[{"name": "AMD Instinct MI300X", "total_memory": 206141652992,
        "gcnArchName": "gfx942:sramecc+:xnack-", "uuid": "61363266-3664-6230-3632-326235346231"}]""",
    XPU: """[{"name": "Intel(R) Arc(TM) B580 Graphics", "total_memory": 12168933376,
        "uuid": "86800be200000000030000000000000", "driver_version": "1.6.33578"}]""",
    MPS: "[{}]",
}
ALL_HAVE = ("Event", "synchronize", "is_available", "device_count", "get_rng_state", "set_rng_state")
CALLED = {
    **dict.fromkeys(
        (CUDA, ROCM, XPU),
        (
            *(*ALL_HAVE, "mem_get_info", "memory_allocated", "memory_reserved", "reset_peak_memory_stats"),
            *("max_memory_allocated", "max_memory_reserved", "get_device_properties"),
            "set_per_process_memory_fraction",
        ),
    ),
    MPS: (
        *(*ALL_HAVE, "current_allocated_memory", "driver_allocated_memory", "recommended_max_memory"),
        "set_per_process_memory_fraction",
    ),
}
"""What the torch backend calls of each module. They exist in every build, and raise without the device."""


@pytest.mark.parametrize("kind", CALLED)
def test_torch_has_what_is_called_on_each_kind(kind: DeviceKind) -> None:
    module = module_of(kind)
    assert module.__name__ == f"torch.{KINDS[kind].torch}"
    assert [name for name in CALLED[kind] if not callable(getattr(module, name, None))] == []
    assert [
        name for name in ("record", "synchronize", "elapsed_time") if not hasattr(module.Event, name)
    ] == []
    assert "enable_timing" in str(inspect.signature(module.Event)) + str(module.Event.__doc__)
    assert ProfilerActivity.CPU in activities_of(kind)
    assert len(activities_of(kind)) == (1 if kind is MPS else 2)


def test_what_torch_tells_of_amd_s_gpus() -> None:
    (gpu,) = of_answer(ANSWERS[ROCM], ROCM, MAC).visible
    assert (gpu.kind, gpu.name, gpu.architecture) == (ROCM, "AMD Instinct MI300X", "gfx942")
    assert (gpu.memory_bytes, gpu.compute_capability) == (206141652992, None)
    assert gpu.uuid == "61363266-3664-6230-3632-326235346231"


def test_what_torch_tells_of_intel_s_gpus() -> None:
    found = of_answer(ANSWERS[XPU], XPU, MAC)
    (gpu,) = found.visible
    assert (gpu.kind, gpu.name, gpu.architecture) == (XPU, "Intel(R) Arc(TM) B580 Graphics", None)
    assert (gpu.memory_bytes, found.driver) == (12168933376, "1.6.33578")


@pytest.mark.parametrize(
    ("build", "system", "machine", "kind"),
    [
        ({"hip": "7.1.25424"}, "Linux", "x86_64", ROCM),
        ({"xpu": "20250302"}, "Linux", "x86_64", XPU),
        ({}, "Darwin", "arm64", MPS),
        ({}, "Darwin", "x86_64", None),
        ({"cuda": "13.0"}, "Linux", "x86_64", None),
        ({}, "Linux", "aarch64", None),
    ],
)
def test_torch_is_asked_for_the_one_kind_that_it_was_built_for(
    build: dict[str, str], system: str, machine: str, kind: DeviceKind | None
) -> None:
    assert built_for(build, system, machine) is kind


@pytest.mark.slow
def test_a_torch_for_rocm_is_recorded_and_one_that_cannot_be_loaded_has_no_gpu(tmp_path: Path) -> None:
    tree(tmp_path, **{"torch__version.py": "cuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n"})
    (tmp_path / "torch/__init__.py").write_text("raise ImportError\n")
    code = "from optigpu.hardware import probe\nhere = probe()\n"
    code += "print(here.software['torch_hip'], [gpu.name for gpu in here.accelerators if gpu.kind == 'rocm'])"
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    }
    answer = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
    assert answer.stdout == b"7.1.25424 []\n"


def test_torch_s_cuda_is_an_amd_gpu_where_it_was_built_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "7.1.25424")
    assert kind_of(torch.device("cuda:0")) is ROCM
    assert (is_there(ROCM), is_there(CUDA)) == (True, False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert (is_there(ROCM), is_there(CUDA)) == (False, True)


@pytest.mark.parametrize("kind", [ROCM, XPU, MPS])
def test_a_torch_that_finds_no_such_device_says_so(kind: DeviceKind) -> None:
    if is_there(kind):
        pytest.skip("This machine has one.")
    with pytest.raises(
        UnsupportedError, match=f"built for no {kind.upper()}.*finds no {kind.upper()} device"
    ):
        require(kind)


def test_what_an_apple_gpu_lacks_is_null_with_the_reason() -> None:
    ran: list[bool] = []
    peaks = peaks_of(lambda: ran.append(True), MPS)
    assert (ran, peaks.allocated_bytes, peaks.reserved_bytes) == ([True], None, None)
    assert "keeps no peak" in peaks.reasons["peak_bytes"]
    with pytest.raises(
        UnsupportedError, match="There is no profile on mps: torch's profiler records no kernels"
    ):
        Recording(CpuClock(), MPS, steps=1)
