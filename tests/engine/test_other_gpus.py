"""AMD's, Intel's and Apple's GPUs, without one: what torch tells of them, and that torch has what is called there.

The answers in `ANSWERS` are made by hand, after the properties that PyTorch's documentation lists: no machine gave
them.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from optigpu.backends import BACKENDS
from optigpu.backends.torch.attention import activities_of
from optigpu.backends.torch.clock import CpuClock
from optigpu.backends.torch.device import is_there, kind_of, module_of, require
from optigpu.backends.torch.memory import peaks_of
from optigpu.backends.torch.profile import Recording
from optigpu.backends.torch.told_gpus import PROPERTIES, described
from optigpu.backends.torch.training.step import FOREACH
from optigpu.documents.selftest import Subject
from optigpu.hardware import gpu as asking
from optigpu.hardware.device_kinds import KINDS
from optigpu.hardware.gpu import OfHost, OtherGpus, built_for, of_answer, other_gpus, require_sensors
from optigpu.hardware.sensors import SensorError
from optigpu.models.loading.self_written import forked_random
from optigpu.selftest.checks import all_checks
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from tests.engine.trees import tree

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


@pytest.mark.parametrize(("kind", "stub"), [(ROCM, "_CudaDeviceProperties"), (XPU, "_XpuDeviceProperties")])
def test_torch_has_the_properties_that_are_read(kind: DeviceKind, stub: str) -> None:
    text = Path(torch.__file__).with_name("_C").joinpath("__init__.pyi").read_text()
    known = set(
        re.findall(r"^    (\w+):", text.split(f"class {stub}:")[1].split("\nclass ")[0], re.MULTILINE)
    )
    answered = set(json.loads(ANSWERS[kind])[0])
    assert answered <= known & set(PROPERTIES)
    assert {"L2_cache_size" if kind is ROCM else "last_level_cache_size"} <= known


def test_what_torch_tells_of_amd_s_gpus() -> None:
    (gpu,) = of_answer(ANSWERS[ROCM], ROCM, MAC).gpus
    assert (gpu.kind, gpu.name, gpu.architecture) == (ROCM, "AMD Instinct MI300X", "gfx942")
    assert (gpu.memory_bytes, gpu.compute_capability) == (206141652992, None)
    assert gpu.uuid == "61363266-3664-6230-3632-326235346231"


def test_what_torch_tells_of_intel_s_gpus() -> None:
    found = of_answer(ANSWERS[XPU], XPU, MAC)
    (gpu,) = found.gpus
    assert (gpu.kind, gpu.name, gpu.architecture) == (XPU, "Intel(R) Arc(TM) B580 Graphics", None)
    assert (gpu.memory_bytes, found.driver) == (12168933376, "1.6.33578")


def test_an_apple_gpu_has_the_chip_s_name_and_the_host_s_memory() -> None:
    (gpu,) = of_answer(ANSWERS[MPS], MPS, MAC).gpus
    assert (gpu.kind, gpu.name, gpu.memory_bytes) == (MPS, "Apple M2 Pro", 16 * 2**30)
    assert gpu.uuid == "mps-f00d-0"


def test_properties_become_json_whatever_they_are() -> None:
    told = described(
        SimpleNamespace(name="Arc", total_memory=5, uuid=b"\x01\xff", driver_version="1.6", other=3)
    )
    assert told == {"name": "Arc", "total_memory": 5, "uuid": "01ff", "driver_version": "1.6"}


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


def test_without_such_a_torch_no_process_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "PROGRAM", ("/nowhere/python",))
    assert other_gpus(None, MAC) == OtherGpus()
    assert other_gpus(ROCM, MAC) == OtherGpus(), "a program that cannot be started tells of none"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ROCM, XPU, MPS])
def test_the_program_tells_of_no_gpu_that_is_not_there(kind: DeviceKind) -> None:
    if is_there(kind):
        pytest.skip("This machine has one.")
    told = subprocess.run((*asking.PROGRAM, kind), capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == []


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


def test_a_device_of_torch_that_no_variant_runs_on_is_refused() -> None:
    with pytest.raises(
        SpecError, match="There is no device 'meta'; the devices are cpu, cuda, rocm, xpu, mps"
    ):
        kind_of(torch.device("meta"))


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


@pytest.mark.parametrize("kind", [ROCM, XPU, MPS])
def test_what_nvml_does_not_tell_is_null_with_the_reason(kind: DeviceKind) -> None:
    with pytest.raises(
        SensorError, match=f"no reading of {KINDS[kind].title}s: NVML tells of NVIDIA's GPUs alone"
    ):
        require_sensors(kind)
    require_sensors(CUDA)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: 9.07 GB)."),
        torch.OutOfMemoryError("XPU out of memory. Tried to allocate 16.00 GiB."),
        torch.OutOfMemoryError("HIP out of memory. Tried to allocate 16.00 GiB."),
    ],
)
def test_memory_that_ran_out_is_recognized_on_each(error: Exception) -> None:
    assert BACKENDS["torch"].is_out_of_memory(error)
    assert not BACKENDS["torch"].is_out_of_memory(RuntimeError("MPS backend is not available"))


def test_optimizers_update_all_weights_together_where_torch_does() -> None:
    known = _get_foreach_kernels_supported_devices()
    assert [KINDS[kind].torch in known for kind in DeviceKind] == [
        KINDS[kind].torch in FOREACH for kind in DeviceKind
    ]


def test_the_random_state_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    with forked_random(torch.device("cpu")):
        torch.manual_seed(7)
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_self_test_has_checks_for_every_kind() -> None:
    checks = all_checks()
    for kind in DeviceKind:
        subjects = {check.subject for check in checks if check.device is kind}
        assert {Subject.MODEL, Subject.TECHNIQUE, Subject.METER} <= subjects
    kernels = {check.device for check in checks if check.subject is Subject.KERNEL}
    assert kernels == {CPU, CUDA}, "OptiGPU's own kernels are for these"
