"""The INA226: 16 bits, a shunt of up to 81 mV, 64 averaged samples of each voltage in 141 ms."""

from esp32_agent.port.base import PortError
from esp32_agent.port.ina import InaSensor

MASK_ENABLE = 0x06
MANUFACTURER = 0xFE
DIE = 0xFF
TEXAS_INSTRUMENTS = 0x5449
INA226_DIE = 0x226  # its upper 12 bits; the lower 4 are the revision
ALWAYS_SET = 0x4000
AVERAGE_64 = 0x0600
CONVERT_1100_US = 0x0100 | 0x0020  # of the supply's voltage and the shunt's
CONTINUOUS = 0x0007
CONVERSION_READY = 0x0008
OVERFLOW = 0x0004


class Ina226(InaSensor):
    """Reading MASK_ENABLE clears CONVERSION_READY."""

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
        if state & OVERFLOW:
            raise self._overflow()
        return state & CONVERSION_READY != 0
