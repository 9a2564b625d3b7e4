"""The power sensors INA219 and INA226 as their datasheets describe them (SBOS448G, SBOS547A): registers on a bus."""

import errno

from esp32_agent.port import ina
from esp32_agent.port.base import Clock


class Bus(ina.Bus):
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
