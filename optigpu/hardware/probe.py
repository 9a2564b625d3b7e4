"""Describes this machine as an Environment: results are compared by it, and it explains them."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil

from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware.allocation import allocation
from optigpu.hardware.cgroup import memory_limit
from optigpu.hardware.cpu import cpu_cores, cpu_features, cpu_model
from optigpu.hardware.files import contents
from optigpu.hardware.gpu import gpus
from optigpu.hardware.identity import hardware_fingerprint, host_id, software_fingerprint
from optigpu.hardware.origin import container, git_revision, image
from optigpu.hardware.other_gpus import OfHost, built_for, other_gpus
from optigpu.hardware.setup import cpu_setup
from optigpu.vocabulary import DeviceKind

PACKAGES = (
    "optigpu",
    "torch",
    "transformers",
    "tokenizers",
    "triton",
    "numpy",
    "safetensors",
    "torchao",
    "bitsandbytes",
    "gptqmodel",
    "peft",
    "gguf",
    "llama-cpp-python",
    "ik-llama-cpp-python",
    "ai-edge-litert",
    "tensorrt-llm",
    "coremltools",
    "tensorflow",
    "tensorflow-cpu",
    "onnx",
    "onnxruntime",
    "openvino",
    "nncf",
    "nvidia-ml-py",
)
"""The packages whose versions a result records."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""The variables that select GPUs."""


def probe() -> Environment:
    """What this process can use: a container's limits and variables such as CUDA_VISIBLE_DEVICES are respected.

    The hardware is read once for each value of these variables. Commit, packages and compiler are read each time,
    because a measuring process imports what is on disk when it starts.
    """
    return _with_software(_this_machine(tuple(map(os.environ.get, VISIBLE))))


def probed(root: Path) -> Environment:
    """Like `probe`, with the hardware read again. `root` is the root of the file system, for tests."""
    return _with_software(_machine(root))


@cache
def _this_machine(_visible_gpus: tuple[str | None, ...]) -> Environment:
    return _machine(Path("/"))


def _machine(root: Path) -> Environment:
    """The facts that cannot change during the process."""
    nvidia = gpus()
    model, cores = cpu_model(root), cpu_cores(root)
    known, source = host_id(nvidia.uuids, root)
    others = other_gpus(built_for(_torch_build()), OfHost(known, model, psutil.virtual_memory().total))
    accelerators = (*nvidia.visible, *others.gpus)
    return Environment(
        hardware_class=_gpu_class(accelerators) or _cpu_class(model, cores),
        host_id=known,
        host_id_source=source,
        cpu_model=model,
        cpu_cores=cores,
        cpu_features=cpu_features(root),
        cpu_setup=cpu_setup(root),
        memory_bytes=min(psutil.virtual_memory().total, memory_limit(root) or sys.maxsize),
        accelerators=accelerators,
        driver=nvidia.driver or others.driver,
        cuda=nvidia.cuda,
        os=_os(),
        container=container(root),
        image=image(),
        allocation=allocation(),
    )


def _with_software(hardware: Environment) -> Environment:
    """The hardware with the software that is installed now, and the fingerprints of both."""
    revision, dirty = git_revision()
    software = {
        "compiler": _compiler(),
        "git_revision": revision,
        "git_dirty": dirty,
        "software": _software(),
    }
    environment = hardware.model_copy(update=software)
    prints = {
        "hardware_fingerprint": hardware_fingerprint(environment),
        "software_fingerprint": software_fingerprint(environment),
    }
    return environment.model_copy(update=prints)


def best_device() -> DeviceKind:
    """CUDA where this machine has a GPU, else the CPU."""
    return DeviceKind.CUDA if probe().has(DeviceKind.CUDA) else DeviceKind.CPU


def hardware_class(environment: Environment, device: DeviceKind) -> str:
    """The class of the hardware of a job on `device`: the CPU with its cores, or one GPU."""
    if device is DeviceKind.CPU:
        return _cpu_class(environment.cpu_model, environment.cpu_cores)
    return _gpu_class(environment.gpus(device)[:1])


def _cpu_class(model: str, cores: int) -> str:
    return f"{model} {cores} core{'s' if cores > 1 else ''}"


def _gpu_class(accelerators: tuple[Accelerator, ...]) -> str:
    """For example "1x NVIDIA H200 140 GiB"; kinds are joined by " + "; empty without a GPU."""
    names = [f"{gpu.name} {round(gpu.memory_bytes / 2**30)} GiB" for gpu in accelerators]
    return " + ".join(f"{names.count(name)}x {name}" for name in dict.fromkeys(names))


def _compiler() -> str | None:
    """The version line of the compiler that TorchInductor calls; None if it or Python's headers are missing."""
    command = shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    if command is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return None
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else None


def _os() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.platform(terse=True)
    return f"{name}, {platform.system()} {platform.release()}"


def _software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {f"torch_{name}": version for name, version in _torch_build().items()}


def _torch_build() -> dict[str, str]:
    """The versions of CUDA, HIP or XPU that torch was built with, read from its files without loading torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    text = contents(Path(spec.origin).with_name("version.py"))
    return dict(re.findall(r"^(cuda|hip|xpu)\b.*=\s*'([^']+)'", text, re.MULTILINE))
