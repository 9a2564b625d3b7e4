"""Power and energy from sensors that convert by themselves, the INA219 and INA226 (Texas Instruments, SBOS448 and
SBOS547).

Both multiply the voltage over a shunt with the supply's voltage and average on the chip. A calibration register sets
the current's step: calibration = SCALE / (step * shunt); a step of the power is POWER_STEPS steps of the current. The
bus is handed in.
"""

from esp32_agent.port.base import Clock, PortError, Power

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


AFTER_RESET = 0x399F
BUS_RANGE_32_V = 0x2000
GAIN_SHIFT = 11
AVERAGE_128 = 0x0780 | 0x0078  # of the supply's voltage and the shunt's
CONTINUOUS = 0x0007
INA219_READY = 0x0002
INA219_OVERFLOW = 0x0001


class Ina219(InaSensor):
    """12 bits, a shunt of up to 320 mV, 128 averaged samples of each voltage in 136 ms.

    Reading the power register clears INA219_READY. Bit 0 of the calibration is always 0.
    """

    source = "ina219"
    SCALE = 40_960_000_000_000
    POWER_STEPS = 20
    MOST_CALIBRATION = 0xFFFE
    MOST_SHUNT_UV = 320_000

    def _calibrate(self, shunt_uohm: int, max_ma: int) -> int:
        return super()._calibrate(shunt_uohm, max_ma) & 0xFFFE

    def _check_chip(self) -> None:
        if self._read(CONFIGURATION) != AFTER_RESET:
            raise PortError(f"The chip at address {self._address} is no ina219.")

    def _configuration(self, shunt_uv: int) -> int:
        gain = 0
        while 40_000 << gain < shunt_uv:
            gain += 1
        return BUS_RANGE_32_V | gain << GAIN_SHIFT | AVERAGE_128 | CONTINUOUS

    def _is_ready(self) -> bool:
        voltage = self._read(BUS_VOLTAGE)
        if voltage & INA219_OVERFLOW:
            raise self._overflow()
        return voltage & INA219_READY != 0


MASK_ENABLE = 0x06
MANUFACTURER = 0xFE
DIE = 0xFF
TEXAS_INSTRUMENTS = 0x5449
INA226_DIE = 0x226  # its upper 12 bits; the lower 4 are the revision
ALWAYS_SET = 0x4000
AVERAGE_64 = 0x0600
CONVERT_1100_US = 0x0100 | 0x0020  # of the supply's voltage and the shunt's
INA226_READY = 0x0008
INA226_OVERFLOW = 0x0004


class Ina226(InaSensor):
    """16 bits, a shunt of up to 81 mV, 64 averaged samples of each voltage in 141 ms.

    Reading MASK_ENABLE clears INA226_READY.
    """

    source = "ina226"
    SCALE = 5_120_000_000_000
    POWER_STEPS = 25
    MOST_CALIBRATION = 0x7FFF
    MOST_SHUNT_UV = 81_917

    def _check_chip(self) -> None:
        if self._read(MANUFACTURER) != TEXAS_INSTRUMENTS or self._read(DIE) >> 4 != INA226_DIE:
            raise PortError(f"The chip at address {self._address} is no ina226.")

    def _configuration(self, shunt_uv: int) -> int:
        return ALWAYS_SET | AVERAGE_64 | CONVERT_1100_US | CONTINUOUS

    def _is_ready(self) -> bool:
        state = self._read(MASK_ENABLE)
        if state & INA226_OVERFLOW:
            raise self._overflow()
        return state & INA226_READY != 0


class SensorPower(Power):
    """Each conversion stands for the time since the conversion before it.

    The sensor averages over some 140 ms while the model runs, so that a sample taken between two inferences holds the
    power within them. A sensor that fails, or overflows, within a window leaves that window without an energy.
    """

    def __init__(self, sensor: InaSensor, clock: Clock) -> None:
        self.source = sensor.source
        self._sensor = sensor
        self._clock = clock
        self._failed = True
        self._samples = 0

    def read_uw(self) -> int | None:
        try:
            return self._sensor.read_uw()
        except (OSError, PortError):
            return None

    def start(self) -> None:
        self._power_time = 0  # microwatts times microseconds
        self._samples = 0
        self._failed = False
        self._power_uw = 0
        self._take()  # a conversion that ended before the start
        self._samples = 0
        self._then = self._clock.ticks_us()

    def poll(self) -> None:
        if self._take():
            self._sum_up()

    def stop(self) -> tuple[int | None, int]:
        self._take()
        self._sum_up()
        if self._failed or self._samples == 0:
            return None, self._samples
        return self._power_time // 1_000_000, self._samples

    def _take(self) -> bool:
        """Whether there is a new conversion."""
        try:
            power = self._sensor.poll_uw()
        except (OSError, PortError):
            self._failed = True
            return False
        if power is None:
            return False
        self._power_uw = power
        self._samples += 1
        return True

    def _sum_up(self) -> None:
        now = self._clock.ticks_us()
        self._power_time += self._power_uw * self._clock.ticks_diff(now, self._then)
        self._then = now
