"""Wi-Fi in station mode over the interface of `network.WLAN`, which is handed in."""

from esp32_agent.port.base import Clock, Network

JOIN_MS = 20_000
STEP_MS = 100


class Wlan:
    """What is used of MicroPython's network.WLAN."""

    def active(self, on: bool) -> object:
        raise NotImplementedError

    def connect(self, ssid: str, password: str) -> None:
        """Begins to join; raises OSError."""
        raise NotImplementedError

    def disconnect(self) -> None:
        raise NotImplementedError

    def isconnected(self) -> bool:
        raise NotImplementedError

    def status(self, what: str | None = None) -> int:
        """Of "rssi" the signal in dBm, else a number that says how far it came."""
        raise NotImplementedError


class WiFi(Network):
    """`reason` says in a sentence why the last `connect` failed."""

    def __init__(self, wlan: "Wlan", ssid: str, password: str, clock: Clock) -> None:
        self._wlan = wlan
        self._ssid = ssid
        self._password = password
        self._clock = clock
        self.reason = ""

    def connect(self) -> bool:
        try:
            return self._join()
        except OSError as error:
            self.reason = f"The Wi-Fi driver failed: {error}"
            return False

    def rssi(self) -> int | None:
        try:
            return self._wlan.status("rssi") if self._wlan.isconnected() else None
        except (OSError, ValueError):
            return None

    def _join(self) -> bool:
        self._wlan.active(True)
        if self._wlan.isconnected():
            return True
        # The driver refuses a second `connect` while the first one is under way.
        self._wlan.disconnect()
        self._wlan.connect(self._ssid, self._password)
        for _ in range(JOIN_MS // STEP_MS):
            if self._wlan.isconnected():
                self.reason = ""
                return True
            self._clock.sleep_ms(STEP_MS)
        self.reason = (
            f"The Wi-Fi network {self._ssid} did not let the board in (status {self._wlan.status()})."
        )
        return False


class Wired(Network):
    """A host whose system keeps its network."""

    def connect(self) -> bool:
        return True

    def rssi(self) -> int | None:
        return None
