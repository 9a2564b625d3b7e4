"""What this machine is, from the machine itself and from files that other machines would show."""

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

from optigpu.documents.result import Accelerator
from optigpu.hardware import cpu, gpu, hardware_class, probe
from optigpu.hardware.cgroup import cpu_quota, memory_limit, oom_kills
from optigpu.hardware.probe import probed
from optigpu.vocabulary import DeviceKind
from tests.engine.trees import tree

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


def test_the_hardware_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = probe()
    answering(monkeypatch)
    assert probe() == here
    assert probed(Path("/")).accelerators == (H200,)


def test_the_hardware_is_asked_again_when_other_gpus_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    assert probe().accelerators == (H200,)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-hidden")
    assert probe().accelerators == ()


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


def test_a_class_names_models_and_counts() -> None:
    h200 = Accelerator(name="NVIDIA H200", memory_bytes=143771 * 2**20, uuid="GPU-1")
    changes = {"accelerators": (h200, h200), "cpu_model": "AMD EPYC 7763", "cpu_cores": 2}
    machine = probe().model_copy(update=changes)
    assert hardware_class(machine, DeviceKind.CPU) == "AMD EPYC 7763 2 cores"
    assert hardware_class(machine, DeviceKind.CUDA) == "1x NVIDIA H200 140 GiB", "a job uses one of them"


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


def test_a_machine_that_tells_nothing_has_a_cpu_all_the_same(tmp_path: Path) -> None:
    assert cpu.cpu_model(tmp_path)
    assert cpu.cpu_features(tmp_path) == ()
    assert cpu.cpu_cores(tmp_path) >= 1


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


def test_the_affinity_is_respected() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from optigpu.hardware import probe; print(probe().cpu_cores)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"


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


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert (memory_limit(tmp_path), cpu_quota(tmp_path), oom_kills(tmp_path)) == (None, None, 0)


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


def test_a_driver_that_fails_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", broken)
    assert gpu.gpus() == gpu.Gpus()


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


def test_what_a_driver_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch)
    refused = (
        *("nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetEnforcedPowerLimit"),
        *("nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMaxClockInfo"),
    )

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in refused:
        monkeypatch.setattr(pynvml, name, refuse)
    assert gpu.gpus() == gpu.Gpus((H200,), ("GPU-a",), "570.1", None)


def test_a_worker_that_hides_a_gpu_is_on_the_same_host(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch)
    shown = probed(Path("/"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hidden = probed(Path("/"))
    assert (len(shown.accelerators), len(hidden.accelerators)) == (1, 0)
    assert shown.host_id == hidden.host_id
    assert shown.hardware_fingerprint != hidden.hardware_fingerprint, "it has another share of the machine"


def test_a_missing_library_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.gpus() == gpu.Gpus()


@pytest.mark.parametrize("variable", ["PATH", "CXX"])
def test_without_a_compiler_there_is_none(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, "/nowhere")
    assert probed(Path("/")).compiler is None


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
