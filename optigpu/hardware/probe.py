"""Describes this machine as an Environment, with the code's origin and what a cluster's scheduler gave the process; an
anonymous id of this host, and fingerprints of hardware and software. `root` is the root of the file system."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil

import optigpu
from optigpu.documents.result import Accelerator, Allocation, Environment, HostIdSource
from optigpu.hardware.cgroup import contents, memory_limit
from optigpu.hardware.cpu import allowed_cpus, cpu_cores, cpu_features, cpu_model, cpu_setup
from optigpu.hardware.gpu import OfHost, built_for, gpus, other_gpus
from optigpu.vocabulary import DeviceKind, Scheduler, canonical_json

_FIRMWARE = ("product_uuid", "board_serial")
_NO_UUIDS = {"03000200-0400-0500-0006-000700080009", "00020003-0004-0005-0006-000700080009"}
"""Placeholders for identifiers on boards, in both byte orders."""


def host_id(gpu_uuids: Sequence[str], root: Path) -> tuple[str, HostIdSource]:
    """A hash of the most reliable identifier that can be read, and its source.

    Root alone can often read the firmware's; all of a machine's GPUs, the hidden ones as well, come next. The rest may
    be a container's instead of the machine's. Then one machine counts as two, which is the lesser evil: hosts that are
    taken for one would continue each other's jobs.
    """
    text, source = next(_known(gpu_uuids, root))
    return hashlib.sha256(f"optigpu {text}".encode()).hexdigest()[:16], source


def hardware_fingerprint(environment: Environment) -> str:
    """A digest of the hardware that this process may use, the same for every user and container.

    It leaves out what needs rights to be read, what an administrator can switch, and the exact sizes of memory. Without
    a GPU, whose UUID is unique, machines of one make and size share a fingerprint.
    """
    return _digest(
        {
            "cpu": environment.cpu_model,
            "cores": environment.cpu_cores,
            "features": sorted(environment.cpu_features),
            "memory": memory_class(environment.memory_bytes),
            "gpus": sorted(gpu.uuid for gpu in environment.accelerators),
        }
    )


def software_fingerprint(environment: Environment) -> str:
    """A digest of the versions that results depend on: packages, commit, driver, compiler, system, image."""
    names = {"software", "driver", "cuda", "compiler", "os", "image", "git_revision", "git_dirty"}
    return _digest(environment.model_dump(mode="json", include=names))


def memory_class(size_bytes: int) -> int:
    """The next of 2^n and 1.5 * 2^n bytes: the installed memory, without what the kernel reserves."""
    power = 1 << max(size_bytes - 1, 1).bit_length() - 1
    return next(size for size in (power, power * 3 // 2, power * 2) if size >= size_bytes)


def _known(gpu_uuids: Sequence[str], root: Path) -> Iterator[tuple[str, HostIdSource]]:
    for name in _FIRMWARE:
        if text := _filled_in(contents(root / "sys/class/dmi/id" / name)):
            yield text, HostIdSource.FIRMWARE
    if gpu_uuids:
        yield " ".join(sorted(gpu_uuids)), HostIdSource.GPUS
    for path in ("etc/machine-id", "var/lib/dbus/machine-id"):
        if text := contents(root / path):
            yield text, HostIdSource.MACHINE_ID
    if address := _network_address(root):
        yield address, HostIdSource.NETWORK_ADDRESS
    yield contents(root / "proc/sys/kernel/hostname") or platform.node(), HostIdSource.HOSTNAME


def _filled_in(text: str) -> str | None:
    """A valid identifier in lower case; None for a placeholder of the maker."""
    text = text.lower()
    digits = re.sub(r"[^0-9a-z]", "", text)
    words = re.search(r"fill|default|specified|serial|none|applicable|0123456789", text)
    return None if len(digits) < 4 or len(set(digits)) < 3 or words or text in _NO_UUIDS else text


def _network_address(root: Path) -> str | None:
    """The lowest address of a network interface with a device, which virtual interfaces lack."""
    folders = (folder for folder in (root / "sys/class/net").glob("*") if (folder / "device").exists())
    texts = (contents(folder / "address") for folder in folders)
    addresses = sorted(text for text in texts if text.strip("0:"))
    if addresses or (root / "sys/class/net").is_dir():
        return addresses[0] if addresses else None
    node = uuid.getnode()  # where there is no such folder (macOS)
    local_or_random = node >> 40 & 0b11
    return None if local_or_random else f"{node:012x}"


def _digest(document: object) -> str:
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()[:16]


PACKAGES = (
    *("optigpu", "torch", "transformers", "tokenizers", "triton", "numpy", "safetensors", "torchao"),
    *(
        "bitsandbytes",
        "gptqmodel",
        "peft",
        "gguf",
        "llama-cpp-python",
        "ik-llama-cpp-python",
        "ai-edge-litert",
    ),
    *("tensorrt-llm", "coremltools", "tensorflow", "tensorflow-cpu", "onnx", "onnxruntime", "openvino"),
    *("nncf", "nvidia-ml-py"),
)
"""The packages whose versions a result records."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""The variables that select GPUs."""


def probe() -> Environment:
    """What this process can use: a container's limits and variables such as CUDA_VISIBLE_DEVICES are respected.

    The hardware is read once for each value of these variables; commit, packages and compiler are read each time.
    """
    return _with_software(_this_machine(tuple(map(os.environ.get, VISIBLE))))


def probed(root: Path) -> Environment:
    """As `probe`, with the hardware read again. `root` is the root of the file system."""
    return _with_software(_machine(root))


@cache
def _this_machine(_visible_gpus: tuple[str | None, ...]) -> Environment:
    return _machine(Path("/"))


def _machine(root: Path) -> Environment:
    nvidia = gpus()
    model, cores = cpu_model(root), cpu_cores(root)
    known, source = host_id(nvidia.uuids, root)
    others = other_gpus(built_for(_torch_build()), OfHost(known, model, psutil.virtual_memory().total))
    accelerators = (*nvidia.visible, *others.visible)
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.platform(terse=True)
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
        os=f"{name}, {platform.system()} {platform.release()}",
        container=container(root),
        image=image(),
        allocation=allocation(),
    )


def _with_software(hardware: Environment) -> Environment:
    revision, dirty = git_revision()
    software = {"git_revision": revision, "git_dirty": dirty, "software": _software()}
    environment = hardware.model_copy(update={"compiler": _compiler(), **software})
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
    command = shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))
    if command is None or not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return None
    answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else None


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


SLURM_JOB = "SLURM_JOB_ID"
ASK_SLURM = ("scontrol", "show", "job", "--oneliner")
_PATIENCE_S = 5.0


def allocation(ask: Sequence[str] = ASK_SLURM) -> Allocation | None:
    """The allocation that this process runs in; None outside of one. `ask` is the program that says more of it.

    Without an answer only the job's id and the CPUs are known.
    """
    job_id = os.environ.get(SLURM_JOB)
    if not job_id:
        return None
    command = [*ask, job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S)
        answer = done.stdout if done.returncode == 0 else ""
    except (OSError, subprocess.SubprocessError):
        answer = ""
    told = dict(re.findall(r"(?:^|\s)([A-Z][\w:/]*)=(\S*)", answer))  # JobId=7 OverSubscribe=NO ...
    shared = told.get("OverSubscribe")
    # The CPUs that this process may use, as 0-3,8; None where the system does not say.
    ranges: list[list[int]] = []
    for cpu in sorted(allowed_cpus()):
        if ranges and cpu == ranges[-1][-1] + 1:
            ranges[-1].append(cpu)
        else:
            ranges.append([cpu])
    return Allocation(
        scheduler=Scheduler.SLURM,
        job_id=job_id,
        gres=told.get("TresPerNode", "").removeprefix("gres:") or None,
        cpuset=",".join(f"{each[0]}-{each[-1]}" if each[1:] else str(each[0]) for each in ranges) or None,
        node_shared=None if shared is None else shared != "NO",
    )


IMAGE = "OPTIGPU_IMAGE"
"""The environment variable with the name of the image; its builder sets it."""
REVISION = "OPTIGPU_REVISION"
"""The environment variable with the commit that an image was built from; an image holds no checkout."""

_GIT_PATIENCE_S = 5.0
_MARKS = {".dockerenv": "docker", "run/.containerenv": "podman"}
_GROUPS = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "lxc": "lxc"}


def git_revision(package: Path | None = None) -> tuple[str | None, bool | None]:
    """The commit of the checkout around the package, and whether the package differs from it, new files included.

    Outside of a checkout the value of REVISION, and None. (None, None) where neither is known, or git is missing or
    refuses a checkout that belongs to another user.
    """
    folder = package or Path(optigpu.__file__).resolve().parent
    if not (folder.parent / ".git").exists():  # not just any checkout around an installed package
        return os.environ.get(REVISION) or None, None
    # Without the variables that select another repository, and without git rewriting its index.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder.parent), "status", "--porcelain=v2", "--branch"]
    command += ["--untracked-files=normal", "--", folder.name]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=variables | {"GIT_OPTIONAL_LOCKS": "0"},
            timeout=_GIT_PATIENCE_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    commit = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", answer, re.MULTILINE)
    if commit is None:  # a checkout without any commit yet
        return None, None
    return commit[1], any(not line.startswith("#") for line in answer.splitlines())


def container(root: Path) -> str | None:
    """The kind of container that this process runs in; None if no mark of one is found."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if named := contents(root / "run/systemd/container"):
        return named
    for mark, kind in _MARKS.items():
        if (root / mark).exists():
            return kind
    groups = contents(root / "proc/1/cgroup")
    return next((kind for mark, kind in _GROUPS.items() if mark in groups), None)


def image() -> str | None:
    """The name of the container image, from the environment; None if it is not set."""
    return os.environ.get(IMAGE) or None
