"""What the power sensors INA219 and INA226 (Texas Instruments, SBOS448 and SBOS547) have in common.

Both multiply the voltage over a shunt with the supply's voltage and average on the chip. A calibration register sets
the current's step: calibration = SCALE / (step * shunt); a step of the power is POWER_STEPS steps of the current.
The bus is handed in.
"""

from esp32_agent.port.base import PortError

CONFIGURATION = 0x00
BUS_VOLTAGE = 0x02
POWER = 0x03
CALIBRATION = 0x05
RESET = 0x8000
FULL_SCALE = 32768  # steps of the current register


class Bus:
    """What is used of MicroPython's machine.I2C. A chip that does not answer is an OSError."""

    def readfrom_mem(self, address: int, register: int, count: int) -> bytes:
        raise NotImplementedError

    def writeto_mem(self, address: int, register: int, data: bytes) -> None:
        raise NotImplementedError


class InaSensor:
    """A sensor with its shunt in micro-ohms and the largest current that is expected, in milliamperes.

    Raises PortError if the shunt does not suit the current, or if no such chip answers.
    """

    source = ""
    SCALE = 0
    """The datasheet's constant of the calibration, in nanoamperes times micro-ohms."""
    POWER_STEPS = 0
    MOST_CALIBRATION = 0
    MOST_SHUNT_UV = 0

    def __init__(self, bus: Bus, address: int = 0x40, shunt_uohm: int = 100_000, max_ma: int = 800) -> None:
        self._bus = bus
        self._address = address
        shunt_uv = max_ma * shunt_uohm // 1000
        if shunt_uv > self.MOST_SHUNT_UV:
            given = f"{max_ma} mA over a shunt of {shunt_uohm} micro-ohms is {shunt_uv} uV"
            raise PortError(
                f"{given}; the {self.source} measures up to {self.MOST_SHUNT_UV} uV: take a smaller shunt, or max_ma."
            )
        self._calibration = self._calibrate(shunt_uohm, max_ma)
        self._power_step_nw = self.POWER_STEPS * self.SCALE // (self._calibration * shunt_uohm)
        try:
            self._begin(shunt_uv)
        except OSError as error:
            raise PortError(
                f"No {self.source} answers at address {address} of the I2C bus: {error}"
            ) from None

    def read_uw(self) -> int:
        """The power of the last conversion in microwatts. Raises OSError, and PortError on overflow."""
        self._is_ready()
        return self._power_uw()

    def poll_uw(self) -> int | None:
        """The same, once for each conversion; None while there is no new one."""
        return self._power_uw() if self._is_ready() else None

    def _calibrate(self, shunt_uohm: int, max_ma: int) -> int:
        """The register's value for the smallest step at which `max_ma` still fits."""
        step_na = -(-max_ma * 1_000_000 // FULL_SCALE)
        calibration = min(self.SCALE // (step_na * shunt_uohm), self.MOST_CALIBRATION)
        if calibration < 2:
            raise PortError(f"A shunt of {shunt_uohm} micro-ohms is too large for the {self.source}.")
        return calibration

    def _begin(self, shunt_uv: int) -> None:
        self._write(CONFIGURATION, RESET)
        self._check_chip()
        self._write(CONFIGURATION, self._configuration(shunt_uv))
        self._write(CALIBRATION, self._calibration)
        if self._read(CALIBRATION) != self._calibration:
            raise PortError(
                f"The chip at address {self._address} does not keep a calibration: no {self.source}?"
            )

    def _check_chip(self) -> None:
        """Raises PortError if it is another chip."""
        raise NotImplementedError

    def _configuration(self, shunt_uv: int) -> int:
        """The register's value: ranges, averaging, conversions of both voltages without end."""
        raise NotImplementedError

    def _is_ready(self) -> bool:
        """Whether a conversion ended since the power was read last. Raises PortError if it overflowed."""
        raise NotImplementedError

    def _power_uw(self) -> int:
        return self._read(POWER) * self._power_step_nw // 1000

    def _overflow(self) -> PortError:
        return PortError(
            f"The current is above the range of the {self.source}: raise max_ma, or take a smaller shunt."
        )

    def _read(self, register: int) -> int:
        return int.from_bytes(self._bus.readfrom_mem(self._address, register, 2), "big")

    def _write(self, register: int, value: int) -> None:
        self._bus.writeto_mem(self._address, register, value.to_bytes(2, "big"))
