"""The INA219: 12 bits, a shunt of up to 320 mV, 128 averaged samples of each voltage in 136 ms."""

from esp32_agent.port.base import PortError
from esp32_agent.port.ina import BUS_VOLTAGE, CONFIGURATION, InaSensor

AFTER_RESET = 0x399F
BUS_RANGE_32_V = 0x2000
GAIN_SHIFT = 11
AVERAGE_128 = 0x0780 | 0x0078  # of the supply's voltage and the shunt's
CONTINUOUS = 0x0007
CONVERSION_READY = 0x0002
OVERFLOW = 0x0001


class Ina219(InaSensor):
    """Reading the power register clears CONVERSION_READY. Bit 0 of the calibration is always 0."""

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
        if voltage & OVERFLOW:
            raise self._overflow()
        return voltage & CONVERSION_READY != 0
