"""GPUs: NVIDIA's through NVML, and AMD's, Intel's and Apple's, of which a process of its own asks torch.

NVML's readings are typed, in SI units, with errors as sentences of SensorErrors. Without the library or a working
driver the machine counts as one without NVIDIA GPUs. Nothing of this has run beside the others: it follows PyTorch's
documentation of torch.cuda, torch.xpu and torch.mps.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optigpu
from optigpu.documents.result import Accelerator
from optigpu.hardware.device_kinds import KINDS, Ability
from optigpu.hardware.sensors import SensorError, or_none
from optigpu.vocabulary import DeviceKind

SLICE = "MIG-"
"""Begins the UUID of a slice."""

SLOWDOWNS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""nvmlClocksEventReasons: why the clocks are not at their maximum."""


class Driver(AbstractContextManager["Driver"]):
    """The open library, until `close` or the end of a `with` block. Raises SensorError if it cannot be opened."""

    def __init__(self) -> None:
        _ask("access", "nvmlInit")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the library; a driver that has gone is not an error."""
        with suppress(SensorError):
            _ask("its end", "nvmlShutdown")

    def version(self) -> str:
        return str(_ask("the driver's version", "nvmlSystemGetDriverVersion"))

    def cuda_version(self) -> str:
        """The newest version of CUDA that the driver can run, for example "12.8"."""
        number = int(_ask("its CUDA version", "nvmlSystemGetCudaDriverVersion"))
        return f"{number // 1000}.{number % 1000 // 10}"

    def gpus(self) -> tuple["Gpu", ...]:
        """Every GPU that CUDA may run on: of a card that MIG divides, its slices that this process may use."""
        return tuple(gpu for card in self.cards() for gpu in card.parts())

    def cards(self) -> tuple["Gpu", ...]:
        """Every card in the driver's order, which is that of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
        count = int(_ask("the number of GPUs", "nvmlDeviceGetCount"))
        return tuple(Gpu(_ask("a GPU", "nvmlDeviceGetHandleByIndex", index)) for index in range(count))

    def gpu(self, uuid: str) -> "Gpu":
        handle = _ask(f"the GPU {uuid}", "nvmlDeviceGetHandleByUUID", uuid)
        if not uuid.startswith(SLICE):
            return Gpu(handle)
        return Gpu(handle, _ask("the GPU of a slice", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle))


class Gpu:
    """One GPU of an open Driver, or one slice of it. Every reading raises SensorError if the GPU does not give it.

    A slice has a name, a UUID, memory and processes of its own, its `card`'s clocks, heat and limits, and none of what
    the card counts for all slices together (energy, power, utilization).
    """

    def __init__(self, handle: object, card: object = None) -> None:
        self._handle = handle
        self._card = card or handle

    def parts(self) -> list["Gpu"]:
        """Itself, or the slices if MIG divides it. A number may belong to no slice, or to another container's."""
        try:
            is_on, _after_a_reset = self._ask("whether MIG is on", "nvmlDeviceGetMigMode")
        except SensorError:
            return [self]
        if not is_on:
            return [self]
        found = []
        for number in range(int(self._ask("its number of slices", "nvmlDeviceGetMaxMigDeviceCount"))):
            with suppress(SensorError):
                slice_ = self._ask("a slice", "nvmlDeviceGetMigDeviceHandleByIndex", number)
                found.append(Gpu(slice_, self._handle))
        return found

    def name(self) -> str:
        """For example "NVIDIA H200", or "NVIDIA H200 MIG 1g.18gb" for a slice."""
        return str(self._ask("its name", "nvmlDeviceGetName"))

    def uuid(self) -> str:
        """For example "GPU-7f3c...", or "MIG-19c2..." for a slice."""
        return str(self._ask("its UUID", "nvmlDeviceGetUUID"))

    def compute_capability(self) -> str:
        """For example "9.0"."""
        major, minor = self._ask_card("its compute capability", "nvmlDeviceGetCudaComputeCapability")
        return f"{major}.{minor}"

    def memory_bytes(self) -> int:
        return int(self._ask("its memory", "nvmlDeviceGetMemoryInfo").total)

    def free_bytes(self) -> int:
        return int(self._ask("its memory", "nvmlDeviceGetMemoryInfo").free)

    def energy_j(self) -> float:
        """Joules since the driver was loaded, in steps of a millijoule; Volta and later."""
        return float(self._ask_whole("its energy counter", "nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def power_w(self) -> float:
        """Power of the board: current, or the mean over the last second (from Ampere on, except GA100)."""
        return float(self._ask_whole("its power", "nvmlDeviceGetPowerUsage")) / 1e3

    def power_limit_w(self) -> float:
        return float(self._ask_card("its power limit", "nvmlDeviceGetEnforcedPowerLimit")) / 1e3

    def utilization(self) -> float:
        """Share of the last sampling period (1/6 to 1 s) in which a kernel ran, 0 to 1."""
        return float(self._ask_whole("its utilization", "nvmlDeviceGetUtilizationRates").gpu) / 100

    def sm_clock_hz(self) -> float:
        return self._clock_hz("NVML_CLOCK_SM")

    def memory_clock_hz(self) -> float:
        return self._clock_hz("NVML_CLOCK_MEM")

    def sm_clock_max_hz(self) -> float:
        return self._clock_hz("NVML_CLOCK_SM", "nvmlDeviceGetMaxClockInfo")

    def memory_clock_max_hz(self) -> float:
        return self._clock_hz("NVML_CLOCK_MEM", "nvmlDeviceGetMaxClockInfo")

    def persistence_mode(self) -> bool:
        """Whether the driver stays loaded while no process uses the GPU."""
        return bool(self._ask_card("its persistence mode", "nvmlDeviceGetPersistenceMode"))

    def temperature_c(self) -> float:
        """Of the chip, in degrees Celsius."""
        return float(self._ask_card("its temperature", "nvmlDeviceGetTemperature", "NVML_TEMPERATURE_GPU"))

    def slowdowns(self) -> tuple[str, ...]:
        """Why the clocks are not at their maximum, by NVML's names; "gpu_idle" is harmless.

        The function's older name is asked for, since every driver has it and both give the same bits.
        """
        bits = int(self._ask_card("its throttle reasons", "nvmlDeviceGetCurrentClocksThrottleReasons"))
        return tuple(name for bit, name in SLOWDOWNS.items() if bits & bit)

    def heat_s(self) -> float:
        """Seconds since the driver was loaded in which heat lowered the clocks."""
        return self._held_down_s("NVML_PERF_POLICY_THERMAL")

    def power_cap_s(self) -> float:
        """Seconds since the driver was loaded in which the power limit lowered the clocks."""
        return self._held_down_s("NVML_PERF_POLICY_POWER")

    def compute_pids(self) -> tuple[int, ...]:
        """Processes that compute on it, in the driver's numbering; a container may see none or others."""
        running = self._ask("its processes", "nvmlDeviceGetComputeRunningProcesses")
        return tuple(int(process.pid) for process in running)

    def _clock_hz(self, kind: str, function: str = "nvmlDeviceGetClockInfo") -> float:
        return float(self._ask_card("its clocks", function, kind)) * 1e6

    def _held_down_s(self, policy: str) -> float:
        status = self._ask_card("what holds its clocks down", "nvmlDeviceGetViolationStatus", policy)
        return float(status.violationTime) / 1e9

    def _ask(self, what: str, function: str, *arguments: object) -> Any:
        return _ask(what, function, self._handle, *arguments)

    def _ask_card(self, what: str, function: str, *arguments: object) -> Any:
        return _ask(what, function, self._card, *arguments)

    def _ask_whole(self, what: str, function: str, *arguments: object) -> Any:
        if self._card is not self._handle:
            raise SensorError(f"A MIG slice does not report {what}: its GPU counts all slices together.")
        return self._ask(what, function, *arguments)


def _ask(what: str, function: str, *arguments: object) -> Any:
    """Calls a function of the library; arguments may be names of its constants."""
    try:
        import pynvml as nvml
    except ImportError:
        raise SensorError(
            "The package nvidia-ml-py is not installed, so GPUs cannot be read; install it."
        ) from None
    too_old = f"The NVIDIA driver is too old to report {what}; update it."
    try:
        return getattr(nvml, function)(*(getattr(nvml, str(each), each) for each in arguments))
    except nvml.NVMLLibraryMismatchError as error:  # no NVMLError: the driver lacks a call's newest version
        raise SensorError(too_old) from error
    except nvml.NVMLError as error:
        sentences = {
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "This machine has no NVIDIA driver library (libnvidia-ml.so.1); install "
            "the driver, or make it available in the container.",
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is not loaded; load it and run again.",
            nvml.NVML_ERROR_NOT_SUPPORTED: f"This GPU does not report {what}.",
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND: too_old,
            nvml.NVML_ERROR_NO_PERMISSION: f"The NVIDIA driver does not let this user read {what}; run with more "
            "privileges.",
            nvml.NVML_ERROR_GPU_IS_LOST: "The GPU is lost: it no longer responds to its driver; restart the machine.",
        }
        other = f"The NVIDIA driver failed to report {what} ({error}); see the kernel log."
        raise SensorError(sentences.get(error.value, other)) from error


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process may use, the UUIDs of all cards, and the versions of driver and CUDA."""

    visible: tuple[Accelerator, ...] = ()
    uuids: tuple[str, ...] = ()
    driver: str | None = None
    cuda: str | None = None


def gpus() -> Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES selects, in its order."""
    try:
        with Driver() as driver:
            uuids = tuple(card.uuid() for card in driver.cards())
            return Gpus(_visible(driver), uuids, driver.version(), or_none(driver.cuda_version))
    except SensorError:
        return Gpus()


@contextmanager
def job_gpu() -> Iterator[Gpu]:
    """The GPU that a job runs on: the first that CUDA shows to this process. Open for the block.

    Raises SensorError where there is none.
    """
    with Driver() as driver:
        shown = _visible(driver)
        if not shown:
            raise SensorError(
                "CUDA_VISIBLE_DEVICES selects no GPU that the driver knows; change or unset it."
            )
        yield driver.gpu(shown[0].uuid)


def require_sensors(device: DeviceKind) -> None:
    """Raises SensorError for a kind of device that NVML does not tell of."""
    reason = KINDS[device].lacks.get(Ability.SENSORS)
    if reason:
        raise SensorError(f"There is no reading of {KINDS[device].title}s: {reason}.")


def free_bytes(uuid: str) -> int | None:
    try:
        with Driver() as driver:
            return driver.gpu(uuid).free_bytes()
    except SensorError:
        return None


def visible(every: Sequence[Accelerator], chosen: str | None) -> tuple[Accelerator, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects: by number or prefix of the UUID, up to the first invalid one."""
    if chosen is None:
        return tuple(every)
    found: list[Accelerator] = []
    for word in filter(None, (part.strip() for part in chosen.split(","))):
        matches = [gpu for index, gpu in enumerate(every) if word == str(index) or gpu.uuid.startswith(word)]
        if len(matches) != 1:
            break
        found += matches
    return tuple(found)


def _visible(driver: Driver) -> tuple[Accelerator, ...]:
    return visible([_accelerator(gpu) for gpu in driver.gpus()], os.environ.get("CUDA_VISIBLE_DEVICES"))


def _accelerator(gpu: Gpu) -> Accelerator:
    clocks = (or_none(read) for read in (gpu.sm_clock_max_hz, gpu.memory_clock_max_hz))
    clock_hz, memory_clock_hz = (None if clock is None else round(clock) for clock in clocks)
    return Accelerator(
        name=gpu.name(),
        memory_bytes=gpu.memory_bytes(),
        uuid=gpu.uuid(),
        compute_capability=gpu.compute_capability(),
        clock_max_hz=clock_hz,
        memory_clock_max_hz=memory_clock_hz,
        power_limit_w=or_none(gpu.power_limit_w),
        persistence_mode=or_none(gpu.persistence_mode),
    )


PROGRAM = (sys.executable, "-P", "-m", "optigpu.backends.torch.device")
"""Tells what torch knows of its GPUs. -P keeps files of the working directory from being taken for modules."""
LIMIT_S = 120.0
"""Torch may have to be read from a slow disk."""


@dataclass(frozen=True)
class OfHost:
    """What torch does not tell: the host's id, its CPU (a Mac's chip has the GPU), and its memory."""

    id: str
    cpu_model: str
    memory_bytes: int


def built_for(
    torch_build: Mapping[str, str], system: str = platform.system(), machine: str = platform.machine()
) -> DeviceKind | None:
    """The one kind of such GPUs that this torch can use, by what it was built with; None for the others."""
    if "hip" in torch_build:
        return DeviceKind.ROCM
    if "xpu" in torch_build:
        return DeviceKind.XPU
    return DeviceKind.MPS if (system, machine) == ("Darwin", "arm64") else None


def other_gpus(kind: DeviceKind | None, host: OfHost) -> Gpus:
    """Those of that kind, in torch's order. No process is started where there can be none."""
    if kind is None:
        return Gpus()
    path = os.pathsep.join(
        filter(None, (str(Path(optigpu.__file__).parents[1]), os.environ.get("PYTHONPATH")))
    )
    variables = os.environ | {"PYTHONPATH": path}
    try:
        answer = subprocess.run(
            (*PROGRAM, kind), env=variables, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return Gpus()
    return of_answer(answer.stdout, kind, host) if answer.returncode == 0 else Gpus()


def of_answer(text: str, kind: DeviceKind, host: OfHost) -> Gpus:
    """The GPUs of the program's answer, a JSON list with torch's properties of each under torch's names."""
    told: list[dict[str, Any]] = json.loads(text)
    drivers = (each["driver_version"] for each in told if each.get("driver_version"))
    accelerators = (
        Accelerator(
            kind=kind,
            name=each.get("name") or host.cpu_model,
            memory_bytes=each.get("total_memory") or host.memory_bytes,
            uuid=each.get("uuid") or f"{kind}-{host.id}-{number}",
            architecture=each.get("gcnArchName", "").partition(":")[0] or None,  # "gfx942:sramecc+:xnack-"
        )
        for number, each in enumerate(told)
    )
    return Gpus(tuple(accelerators), driver=next(drivers, None))
