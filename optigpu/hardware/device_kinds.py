"""What each kind of device has and lacks, for techniques, meters, the torch backend and the documentation.

Nothing has run on ROCM, XPU and MPS: what is said of them is from the documentation that `sources` name.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from optigpu.documents.result import Environment
from optigpu.vocabulary import DeviceKind


class Ability(StrEnum):
    """What a technique, a kernel's check or a meter may need of a device; the value names it."""

    CPU_ENGINE = "engines that compute on the CPU"
    OWN_KERNELS = "OptiGPU's own kernels"
    FLOAT64 = "float64"
    TF32 = "tf32 products"
    FP8 = "fp8 products"
    SCALED_LOSS = "float16 with a scaled loss"
    INDUCTOR = "TorchInductor"
    GRAPHS = "recorded graphs"
    LANE = "weights that come from the host"
    OWN_MEMORY = "memory apart from the host's"
    ATTENTION_KERNELS = "a choice of attention kernels"
    OPTIMIZER_8BIT = "bitsandbytes' optimizers"
    VLLM = "vLLM"
    MEMORY_PEAKS = "peaks of allocated memory"
    PROFILE = "kernels in a profile"
    ENERGY = "a sensor of energy"
    SENSORS = "NVML's sensors"


@dataclass(frozen=True)
class KindFacts:
    """A kind of device: `title` in a sentence, `torch` as torch calls it; `tool` is what shows what runs on it.

    `activity` is its kernels' name in torch's profiler, `built` the software whose version torch was built for. `lacks`
    gives for each ability that it does not have the reason, a sentence without its full stop.
    """

    title: str
    torch: str
    tool: str
    activity: str | None = None
    built: str | None = None
    lacks: Mapping[Ability, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def lacking(self, abilities: Iterable[Ability]) -> str | None:
        """Why it does not have them all, or None."""
        return next((self.lacks[ability] for ability in abilities if ability in self.lacks), None)


_HIP = "docs.pytorch.org/docs/stable/notes/hip.html"
_MPS = "docs.pytorch.org/docs/stable/notes/mps.html"
_XPU = "docs.pytorch.org/docs/stable/notes/get_start_xpu.html"
_BITSANDBYTES = "huggingface.co/docs/bitsandbytes/v0.50.2/installation"

_CPU_ALONE = "what applies it computes on the CPU alone here"
_KERNELS = "its kernels are in C++ for CPUs and in Triton for NVIDIA's GPUs"
_NOT_VLLM = "vLLM's environment is made for CPUs and NVIDIA's GPUs here"
_NO_SENSOR = "NVML tells of NVIDIA's GPUs alone"
_FIRST_CHOICE = "torch alone chooses the attention kernel there"

_NOT_NVIDIA = {
    Ability.CPU_ENGINE: _CPU_ALONE,
    Ability.OWN_KERNELS: _KERNELS,
    Ability.ATTENTION_KERNELS: _FIRST_CHOICE,
    Ability.VLLM: _NOT_VLLM,
    Ability.SENSORS: _NO_SENSOR,
}
"""What no other GPU than NVIDIA's has here."""

KINDS: Mapping[DeviceKind, KindFacts] = {
    DeviceKind.CPU: KindFacts(
        *("CPU", "cpu", "top"),
        lacks={
            Ability.TF32: "tf32 is a mode of NVIDIA's tensor cores",
            Ability.FP8: "CPUs have no fp8 units",
            Ability.SCALED_LOSS: "CPUs compute float16 slowly",
            Ability.GRAPHS: "a graph is recorded of a GPU's kernels",
            Ability.LANE: "its memory is the host's",
            Ability.OWN_MEMORY: "its memory is the host's",
            Ability.MEMORY_PEAKS: "a CPU has no accelerator memory; see host_peak_bytes",
            Ability.SENSORS: _NO_SENSOR,
        },
    ),
    DeviceKind.CUDA: KindFacts(
        *("NVIDIA GPU", "cuda", "nvidia-smi"),
        activity="CUDA",
        built="torch_cuda",
        lacks={Ability.CPU_ENGINE: _CPU_ALONE},
    ),
    DeviceKind.ROCM: KindFacts(
        *("AMD GPU", "cuda", "amd-smi"),
        activity="CUDA",
        built="torch_hip",
        sources=(_HIP, _BITSANDBYTES),
        lacks={
            **_NOT_NVIDIA,
            Ability.TF32: "PyTorch has tf32 on the MI300 alone, with other numbers than NVIDIA's",
            Ability.FP8: "the MI300 has another format of fp8 (fnuz), and the layers here are for NVIDIA's",
        },
    ),
    DeviceKind.XPU: KindFacts(
        *("Intel GPU", "xpu", "xpu-smi"),
        activity="XPU",
        built="torch_xpu",
        sources=(_XPU, _BITSANDBYTES),
        lacks={
            **_NOT_NVIDIA,
            Ability.FLOAT64: "the Arc A-Series has no float64",
            Ability.TF32: "the switch that it sets is CUDA's",
            Ability.FP8: "the layers here call torch._scaled_mm as NVIDIA's GPUs take it",
            Ability.SCALED_LOSS: "PyTorch's GradScaler needs float64, which the Arc A-Series has not",
            Ability.GRAPHS: "it records with torch.cuda.CUDAGraph, and Intel's are torch.xpu.XPUGraph",
            Ability.LANE: "the lane from the host is written with torch.cuda's streams",
        },
    ),
    DeviceKind.MPS: KindFacts(
        *("Apple GPU", "mps", "Activity Monitor"),
        sources=(_MPS, _BITSANDBYTES),
        lacks={
            **_NOT_NVIDIA,
            Ability.FLOAT64: "Metal has no float64",
            Ability.TF32: "tf32 is a mode of NVIDIA's tensor cores",
            Ability.FP8: "Metal's matrix products take no fp8",
            Ability.INDUCTOR: "torch calls TorchInductor's code for Metal an early prototype (2.13)",
            Ability.GRAPHS: "torch records no graphs of Metal's kernels",
            Ability.LANE: "its memory is the host's",
            Ability.OWN_MEMORY: "its memory is the host's",
            Ability.OPTIMIZER_8BIT: "bitsandbytes 0.50 has no 8-bit optimizers for Metal yet",
            Ability.MEMORY_PEAKS: "torch.mps counts what is allocated now and keeps no peak; see host_peak_bytes",
            Ability.PROFILE: "torch's profiler records no kernels of Metal's",
            Ability.ENERGY: "macOS tells what it draws to administrators alone",
        },
    ),
}
"""Every kind of device."""


def devices_with(abilities: Iterable[Ability]) -> tuple[DeviceKind, ...]:
    """The kinds that have all of these."""
    wanted = tuple(abilities)
    return tuple(kind for kind, facts in KINDS.items() if facts.lacking(wanted) is None)


def torch_name(device: DeviceKind) -> str:
    """What torch calls it: an AMD GPU is "cuda" as well."""
    return KINDS[device].torch


def refusal(device: DeviceKind, ability: Ability, what: str, instead: str) -> str | None:
    """Why `what` does not run there for want of an ability, in one sentence with what to do instead; or None."""
    reason = KINDS[device].lacks.get(ability)
    return f"{what} does not run on {device}: {reason}; {instead}." if reason else None


def no_device(device: DeviceKind, environment: Environment) -> str:
    """That a machine has no such device, and why; a sentence without its full stop."""
    return f"This machine has no {KINDS[device].title} that works ({_why_none(device, environment)})"


def devices_of(environment: Environment) -> str:
    """The devices that a machine has, for example "cpu or mps"."""
    return " or ".join(kind for kind in KINDS if environment.has(kind))


def _why_none(device: DeviceKind, environment: Environment) -> str:
    if device is DeviceKind.CUDA:
        if environment.driver is None:
            return "no NVIDIA driver answers"
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
        return "CUDA_VISIBLE_DEVICES hides each" if hidden else "its driver lists none"
    torch, built = environment.software.get("torch"), KINDS[device].built
    if torch is None:
        return "torch is not installed"
    if built is None:
        return f"torch finds one on macOS with Apple Silicon alone, and this is {environment.os}"
    if built not in environment.software:
        return f"torch {torch} here was not built for one"
    return f"torch {torch} here was built for one and finds none"


def needs_capability(environment: Environment, least: tuple[int, int], what: str) -> str | None:
    """Why the first GPU is too old for `what`, or None. One of unknown capability is taken to be new enough."""
    gpus = environment.gpus(DeviceKind.CUDA)
    if not gpus:
        return f"{what} need an NVIDIA GPU, and this machine has none; leave the technique out or use another machine."
    gpu = gpus[0]
    if gpu.compute_capability is None or tuple(map(int, gpu.compute_capability.split("."))) >= least:
        return None
    needed = ".".join(map(str, least))
    return (
        f"{what} need compute capability {needed} and {gpu.name} has {gpu.compute_capability}; leave the technique "
        "out or use a newer GPU."
    )
