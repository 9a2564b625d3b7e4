"""NVIDIA's management library (NVML): typed readings in SI units, errors as sentences.

All errors (no library, no driver, no permission, a lost GPU) are SensorErrors.
Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from contextlib import suppress
from typing import Any, Self

from optigpu.hardware.sensors import SensorError

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


class Driver:
    """The open library, until `close` or the end of a `with` block. Raises SensorError if it cannot be opened."""

    def __init__(self) -> None:
        _ask("access", "nvmlInit")

    def __enter__(self) -> Self:
        return self

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
        """Every GPU in the driver's order, which is that of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
        count = int(_ask("the number of GPUs", "nvmlDeviceGetCount"))
        return tuple(Gpu(_ask("a GPU", "nvmlDeviceGetHandleByIndex", index)) for index in range(count))

    def gpu(self, uuid: str) -> "Gpu":
        return Gpu(_ask(f"the GPU {uuid}", "nvmlDeviceGetHandleByUUID", uuid))


class Gpu:
    """One GPU of an open Driver. Every reading raises SensorError if the GPU does not give it."""

    def __init__(self, handle: object) -> None:
        self._handle = handle

    def name(self) -> str:
        """For example "NVIDIA H200"."""
        return str(self._ask("its name", "nvmlDeviceGetName"))

    def uuid(self) -> str:
        """For example "GPU-7f3c..."."""
        return str(self._ask("its UUID", "nvmlDeviceGetUUID"))

    def compute_capability(self) -> str:
        """For example "9.0"."""
        major, minor = self._ask("its compute capability", "nvmlDeviceGetCudaComputeCapability")
        return f"{major}.{minor}"

    def memory_bytes(self) -> int:
        """Total memory."""
        return int(self._ask("its memory", "nvmlDeviceGetMemoryInfo").total)

    def free_bytes(self) -> int:
        """Free memory."""
        return int(self._ask("its memory", "nvmlDeviceGetMemoryInfo").free)

    def energy_j(self) -> float:
        """Joules since the driver was loaded, in steps of a millijoule; Volta and later."""
        return float(self._ask("its energy counter", "nvmlDeviceGetTotalEnergyConsumption")) / 1e3

    def power_w(self) -> float:
        """Power of the board: current, or the mean over the last second (from Ampere on, except GA100)."""
        return float(self._ask("its power", "nvmlDeviceGetPowerUsage")) / 1e3

    def power_limit_w(self) -> float:
        """The enforced power limit."""
        return float(self._ask("its power limit", "nvmlDeviceGetEnforcedPowerLimit")) / 1e3

    def utilization(self) -> float:
        """Share of the last sampling period (1/6 to 1 s) in which a kernel ran, 0 to 1."""
        return float(self._ask("its utilization", "nvmlDeviceGetUtilizationRates").gpu) / 100

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
        return bool(self._ask("its persistence mode", "nvmlDeviceGetPersistenceMode"))

    def temperature_c(self) -> float:
        """Temperature of the chip in degrees Celsius."""
        import pynvml

        return float(self._ask("its temperature", "nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU))

    def slowdowns(self) -> tuple[str, ...]:
        """Why the clocks are not at their maximum, by NVML's names; "gpu_idle" is harmless.

        The function's older name is asked for, since every driver has it and both give the same bits.
        """
        bits = int(self._ask("its throttle reasons", "nvmlDeviceGetCurrentClocksThrottleReasons"))
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
        import pynvml

        return float(self._ask("its clocks", function, getattr(pynvml, kind))) * 1e6

    def _held_down_s(self, policy: str) -> float:
        import pynvml

        function = "nvmlDeviceGetViolationStatus"
        status = self._ask("what holds its clocks down", function, getattr(pynvml, policy))
        return float(status.violationTime) / 1e9

    def _ask(self, what: str, function: str, *arguments: object) -> Any:
        return _ask(what, function, self._handle, *arguments)


def _ask(what: str, function: str, *arguments: object) -> Any:
    try:
        import pynvml
    except ImportError:
        raise SensorError(
            "The package nvidia-ml-py is not installed, so GPUs cannot be read; install it."
        ) from None
    try:
        return getattr(pynvml, function)(*arguments)
    except (
        pynvml.NVMLLibraryMismatchError
    ) as error:  # no NVMLError: the driver lacks the newest version of a call
        raise SensorError(_too_old(what)) from error
    except pynvml.NVMLError as error:
        raise SensorError(_sentence(pynvml, what, error)) from error


def _too_old(what: str) -> str:
    return f"The NVIDIA driver is too old to report {what}; update it."


def _sentence(nvml: Any, what: str, error: Any) -> str:
    sentences = {
        nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "This machine has no NVIDIA driver library (libnvidia-ml.so.1); install the "
        "driver, or make it available in the container.",
        nvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA driver is not loaded; load it and run again.",
        nvml.NVML_ERROR_NOT_SUPPORTED: f"This GPU does not report {what}.",
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: _too_old(what),
        nvml.NVML_ERROR_NO_PERMISSION: f"The NVIDIA driver does not let this user read {what}; run with more "
        "privileges.",
        nvml.NVML_ERROR_GPU_IS_LOST: "The GPU is lost: it no longer responds to its driver; restart the machine.",
    }
    other = f"The NVIDIA driver failed to report {what} ({error}); see the kernel log."
    return sentences.get(error.value, other)
