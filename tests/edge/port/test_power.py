"""The power sensors INA219 and INA226 against their datasheets (SBOS448G, SBOS547A), and energy from conversions."""

import errno

import pytest

from esp32_agent.port import power
from esp32_agent.port.base import Clock, PortError
from esp32_agent.port.power import Ina219, Ina226, InaSensor, SensorPower


class Bus(power.Bus):
    """As machine.I2C, with chips at addresses."""

    def __init__(self, **chips: "Chip") -> None:
        self._chips = {int(name.removeprefix("at"), 16): chip for name, chip in chips.items()}

    def readfrom_mem(self, address: int, register: int, count: int) -> bytes:
        return self._chip(address).read(register).to_bytes(2, "big")[:count]

    def writeto_mem(self, address: int, register: int, data: bytes) -> None:
        self._chip(address).write(register, int.from_bytes(data, "big"))

    def unplug(self, address: int) -> None:
        """The wire comes off."""
        del self._chips[address]

    def _chip(self, address: int) -> "Chip":
        if address not in self._chips:
            raise OSError(errno.ENODEV, "No such device")
        return self._chips[address]


class Chip:
    """The registers; `convert` is what the chip does by itself while it is configured to convert without end."""

    after_reset: dict[int, int]

    def __init__(self) -> None:
        self.registers = dict(self.after_reset)
        self.conversions = 0

    def write(self, register: int, value: int) -> None:
        if register == 0 and value & 0x8000:
            self.registers = dict(self.after_reset)
        elif register in (0, 5):
            self.registers[register] = value

    def read(self, register: int) -> int:
        return self.registers.get(register, 0)

    def convert(self, shunt_uv: float, bus_mv: float) -> None:
        raise NotImplementedError


class Ina219Chip(Chip):
    """Shunt in 10 uV, supply in 4 mV (bits 15 to 3), CNVR in bit 1 and OVF in bit 0 of the supply's register."""

    after_reset = {0: 0x399F}  # noqa: RUF012 - the datasheet's table

    def write(self, register: int, value: int) -> None:
        super().write(register, value & 0xFFFE if register == 5 else value)
        if register == 0:
            self._clear_ready()

    def read(self, register: int) -> int:
        value = super().read(register)
        if register == 3:
            self._clear_ready()
        return value

    def _clear_ready(self) -> None:
        self.registers[2] = self.registers.get(2, 0) & ~2

    def convert(self, shunt_uv: float, bus_mv: float) -> None:
        assert self.registers[0] & 7 == 7, "the chip converts only while it is told to"
        range_uv = 40_000 << (self.registers[0] >> 11 & 3)
        shunt = int(min(shunt_uv, range_uv) / 10)
        supply = int(bus_mv / 4)
        current = shunt * self.registers.get(5, 0) // 4096
        power = current * supply // 5000
        overflow = current > 0x7FFF or power > 0xFFFF
        self.registers.update(
            {1: shunt, 2: supply << 3 | 2 | overflow, 3: power & 0xFFFF, 4: current & 0xFFFF}
        )
        self.conversions += 1


class Ina226Chip(Chip):
    """Shunt in 2.5 uV, supply in 1.25 mV, CVRF in bit 3 and OVF in bit 2 of the register mask/enable."""

    after_reset = {0: 0x4127, 0xFE: 0x5449, 0xFF: 0x2260}  # noqa: RUF012 - the datasheet's table

    def write(self, register: int, value: int) -> None:
        super().write(register, value)
        if register == 0:
            self.registers[6] = 0

    def read(self, register: int) -> int:
        value = super().read(register)
        if register == 6:
            self.registers[6] = value & ~8
        return value

    def convert(self, shunt_uv: float, bus_mv: float) -> None:
        assert self.registers[0] & 7 == 7, "the chip converts only while it is told to"
        shunt = int(min(shunt_uv, 81_917.5) / 2.5)
        supply = int(bus_mv / 1.25)
        current = shunt * self.registers.get(5, 0) // 2048
        power = current * supply // 20_000
        overflow = current > 0x7FFF or power > 0xFFFF
        self.registers.update(
            {1: shunt, 2: supply, 3: power & 0xFFFF, 4: current & 0xFFFF, 6: 8 | overflow << 2}
        )
        self.conversions += 1


class SteppedClock(Clock):
    """Ticks that a test moves, with a period of 2**30 as on the board."""

    def __init__(self, start: int = 0) -> None:
        self.now_us = start

    def ticks_us(self) -> int:
        return self.now_us % 2**30

    def ticks_diff(self, later: int, earlier: int) -> int:
        return (later - earlier + 2**29) % 2**30 - 2**29

    def sleep_ms(self, ms: int) -> None:
        self.now_us += 1000 * ms


KINDS = [(Ina219, Ina219Chip), (Ina226, Ina226Chip)]
CONVERSION_US = 140_000


def plugged(kind: type[InaSensor], chip: Chip, **settings: int) -> tuple[InaSensor, Bus]:
    """The driver on a bus with the chip."""
    bus = Bus(at40=chip)
    return kind(bus, 0x40, **settings), bus


def test_the_worked_example_of_the_ina219s_datasheet() -> None:
    """Table 8: 10 A through 2 mOhm at 11.98 V with a step of 1 mA: calibration 5000h, current 2710h, power 1766h."""
    chip = Ina219Chip()
    sensor, _ = plugged(Ina219, chip, shunt_uohm=2000, max_ma=32_768)
    assert chip.registers[5] == 0x5000
    chip.convert(20_000, 11_980)
    assert [chip.registers[register] for register in (1, 4, 3)] == [0x07D0, 0x2710, 0x1766]
    assert chip.registers[2] >> 3 == 0x5D98 >> 3
    assert sensor.read_uw() == 119_800_000


def test_the_worked_example_of_the_ina226s_datasheet() -> None:
    """Table 1: the same load: calibration A00h, shunt 1F40h, supply 2570h, current 2710h, power 12B8h."""
    chip = Ina226Chip()
    sensor, _ = plugged(Ina226, chip, shunt_uohm=2000, max_ma=32_768)
    assert chip.registers[5] == 0x0A00
    chip.convert(20_000, 11_980)
    assert [chip.registers[register] for register in (1, 2, 4, 3)] == [0x1F40, 0x2570, 0x2710, 0x12B8]
    assert sensor.read_uw() == 119_800_000


@pytest.mark.parametrize(("kind", "chip_kind"), KINDS)
def test_an_overflow_is_no_figure(kind: type[InaSensor], chip_kind: type[Chip]) -> None:
    chip = chip_kind()
    sensor, _ = plugged(kind, chip, shunt_uohm=2000, max_ma=10_000)
    chip.convert(38_000, 12_000)
    with pytest.raises(PortError, match="above the range"):
        sensor.poll_uw()


@pytest.mark.parametrize(("kind", "chip_kind"), [(Ina219, Ina226Chip), (Ina226, Ina219Chip)])
def test_the_other_chip_is_refused(kind: type[InaSensor], chip_kind: type[Chip]) -> None:
    with pytest.raises(PortError, match="is no ina2"):
        plugged(kind, chip_kind())


class Supply:
    """A supply whose power follows a plan of (until_us, shunt_uv), with a chip that averages while time passes."""

    def __init__(self, chip: Chip, clock: SteppedClock, plan: list[tuple[int, float]]) -> None:
        self._chip = chip
        self._clock = clock
        self._plan = plan
        self._begin = clock.now_us
        self._converted = 0

    def pass_time(self, us: int) -> None:
        """Time passes, and the chip ends the conversions that are due, each the mean over its own time."""
        self._clock.now_us += us
        passed = self._clock.now_us - self._begin
        while self._converted + CONVERSION_US <= passed:
            self._chip.convert(self._mean(self._converted, self._converted + CONVERSION_US), 5000)
            self._converted += CONVERSION_US

    def _mean(self, begin: int, end: int) -> float:
        total, last = 0.0, 0
        for until, shunt_uv in self._plan:
            total += shunt_uv * max(0, min(end, until) - max(begin, last))
            last = until
        return total / (end - begin)


@pytest.mark.parametrize(("kind", "chip_kind"), KINDS)
@pytest.mark.parametrize("start", [0, 2**30 - 5_000_000])
@pytest.mark.parametrize("between_us", [30_000, 54_000, 1_309_500])
def test_energy_is_the_power_over_the_window(
    kind: type[InaSensor], chip_kind: type[Chip], start: int, between_us: int
) -> None:
    """Half of the time 0.5 W and half 1 W, sampled between inferences of several lengths and through a wrap-around."""
    chip, clock = chip_kind(), SteppedClock(start)
    sensor, _ = plugged(kind, chip)
    power = SensorPower(sensor, clock)
    supply = Supply(chip, clock, [(10_000_000, 10_000.0), (20_000_000, 20_000.0)])
    power.start()
    for _ in range(20_000_000 // between_us):
        supply.pass_time(between_us)
        power.poll()
    energy_uj, samples = power.stop()
    assert energy_uj == pytest.approx(15_000_000, rel=0.08 if between_us > 1_000_000 else 0.02)
    assert samples == pytest.approx(20_000_000 / max(between_us, CONVERSION_US), rel=0.35)


@pytest.mark.parametrize(("kind", "chip_kind"), KINDS)
def test_a_window_without_a_conversion_has_no_energy(kind: type[InaSensor], chip_kind: type[Chip]) -> None:
    chip, clock = chip_kind(), SteppedClock()
    sensor, _ = plugged(kind, chip)
    chip.convert(10_000, 5000)
    power = SensorPower(sensor, clock)
    power.start()
    clock.now_us += 20_000
    assert power.stop() == (None, 0)


@pytest.mark.parametrize(("kind", "chip_kind"), KINDS)
def test_a_sensor_that_comes_off_leaves_its_window_without_energy(
    kind: type[InaSensor], chip_kind: type[Chip]
) -> None:
    chip, clock = chip_kind(), SteppedClock()
    sensor, bus = plugged(kind, chip)
    power = SensorPower(sensor, clock)
    supply = Supply(chip, clock, [(10_000_000, 10_000.0)])
    power.start()
    for _ in range(10):
        supply.pass_time(200_000)
        power.poll()
    bus.unplug(0x40)
    power.poll()
    assert power.stop() == (None, 10)
    assert power.read_uw() is None
    assert power.source == kind.source
