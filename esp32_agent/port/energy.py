"""Energy from a sensor that converts by itself, such as the INA219 and the INA226."""

from esp32_agent.port.base import Clock, PortError, Power
from esp32_agent.port.ina import InaSensor


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
