"""The power sensors against their datasheets' register tables, and energy from their conversions."""

import pytest

from esp32_agent.port.base import PortError
from esp32_agent.port.energy import SensorPower
from esp32_agent.port.ina import InaSensor
from esp32_agent.port.ina219 import Ina219
from esp32_agent.port.ina226 import Ina226
from tests.edge.port.chips import Bus, Chip, Ina219Chip, Ina226Chip, SteppedClock

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
@pytest.mark.parametrize(
    ("shunt_uohm", "max_ma"), [(100_000, 800), (100_000, 400), (10_000, 3000), (50_000, 500)]
)
@pytest.mark.parametrize("current_ma", [20, 77, 250, 390])
def test_a_power_is_read_within_the_chips_resolution(
    kind: type[InaSensor], chip_kind: type[Chip], shunt_uohm: int, max_ma: int, current_ma: int
) -> None:
    chip = chip_kind()
    sensor, _ = plugged(kind, chip, shunt_uohm=shunt_uohm, max_ma=max_ma)
    chip.convert(current_ma * shunt_uohm / 1000, 5000)
    shunt_step_uv = 10 if kind is Ina219 else 2.5
    step_uw = 5_000_000 * shunt_step_uv / shunt_uohm * 1000 + 30 * max_ma / 32_768 * 1000
    assert sensor.read_uw() == pytest.approx(current_ma * 5000, abs=2 * step_uw)


@pytest.mark.parametrize(
    ("kind", "chip_kind", "configuration"), [(Ina219, Ina219Chip, 0x2FFF), (Ina226, Ina226Chip, 0x4727)]
)
def test_the_configuration_averages_and_never_stops(
    kind: type[InaSensor], chip_kind: type[Chip], configuration: int
) -> None:
    """INA219: 32 V, gain /2 for 80 mV, 128 samples of both. INA226: 64 samples of 1.1 ms of both."""
    chip = chip_kind()
    plugged(kind, chip, shunt_uohm=100_000, max_ma=800)
    assert chip.registers[0] == configuration


@pytest.mark.parametrize(("kind", "chip_kind"), KINDS)
def test_a_conversion_is_taken_once(kind: type[InaSensor], chip_kind: type[Chip]) -> None:
    chip = chip_kind()
    sensor, _ = plugged(kind, chip)
    assert sensor.poll_uw() is None
    chip.convert(10_000, 5000)
    taken = sensor.poll_uw()
    assert taken is not None
    assert sensor.poll_uw() is None
    assert sensor.read_uw() == taken


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


@pytest.mark.parametrize("kind", [Ina219, Ina226])
def test_an_empty_bus_is_said(kind: type[InaSensor]) -> None:
    with pytest.raises(PortError, match=r"No ina2.. answers at address 64"):
        kind(Bus(), 0x40)


@pytest.mark.parametrize(("kind", "chip_kind"), KINDS)
def test_a_shunt_that_does_not_suit_is_said(kind: type[InaSensor], chip_kind: type[Chip]) -> None:
    with pytest.raises(PortError, match="take a smaller shunt"):
        plugged(kind, chip_kind(), shunt_uohm=1_000_000, max_ma=800)


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
