"""Inputs that need no camera."""

from esp32_agent.port.base import Camera


class FixedInput(Camera):
    """One and the same input: the first golden one."""

    name = "fixed"

    def __init__(self, data: bytes) -> None:
        self._data = data

    def frame(self) -> bytes:
        return self._data
