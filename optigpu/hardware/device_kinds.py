"""What each kind of device has and lacks, read from device_kinds.toml."""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.resources import files

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


def _read() -> Iterator[tuple[DeviceKind, KindFacts]]:
    """Each kind of the file, with what no GPU but NVIDIA's has here."""
    text = files("optigpu.hardware").joinpath("device_kinds.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    of_others = tables["other_gpus"]["lacks"]
    for kind in DeviceKind:
        facts = tables[kind.value]
        shared = {} if kind in (DeviceKind.CPU, DeviceKind.CUDA) else of_others
        lacks = {Ability[name.upper()]: why for name, why in (shared | facts["lacks"]).items()}
        yield kind, KindFacts(**facts | {"lacks": lacks, "sources": tuple(facts.get("sources", ()))})


KINDS: Mapping[DeviceKind, KindFacts] = dict(_read())
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
