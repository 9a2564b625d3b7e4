"""What the bytes of a runner mean for a model, by the profile: MLPerf Tiny's own conversions.

Runs on MicroPython and on CPython. A quantized number q stands for (q - zero_point) * scale.
"""

import struct

TYPE_CHECKING = False  # MicroPython has no typing
if TYPE_CHECKING:
    from collections.abc import Iterator

UINT8, INT8, FLOAT32 = "uint8", "int8", "float32"
INPUTS = {"ic01": UINT8, "vww01": UINT8, "kws01": INT8, "ad01": FLOAT32}
"""The profiles, and what their runner sends. ad01 answers one number: how far the output is from the input."""

MOST_BYTES = 27648
"""The largest input that the protocol carries: 96 x 96 x 3."""


class Scale:
    """Scale and zero point of an int8 tensor."""

    def __init__(self, scale: float, zero_point: int) -> None:
        self.scale = scale
        self.zero_point = zero_point

    def number(self, byte: int) -> float:
        """The number that one byte of the tensor stands for."""
        return ((byte - 256 if byte > 127 else byte) - self.zero_point) * self.scale

    def byte(self, number: float) -> int:
        """The nearest byte. Raises ValueError or OverflowError for NaN and infinity."""
        rounded = int(number / self.scale + (0.5 if number >= 0 else -0.5)) + self.zero_point
        return max(-128, min(127, rounded)) & 0xFF


class Codec:
    """Between the runner's bytes and a model of int8. Raises ValueError for one that cannot be run."""

    def __init__(self, profile: str, input_bytes: int, input_scale: Scale, output_scale: Scale) -> None:
        if profile not in INPUTS:
            names = ", ".join(sorted(INPUTS))
            raise ValueError(f"unknown profile {profile}; there are {names}")
        self.profile = profile
        self._kind = INPUTS[profile]
        self._input, self._output = input_scale, output_scale
        self.buffer_bytes = input_bytes * (4 if self._kind == FLOAT32 else 1)
        if self.buffer_bytes > MOST_BYTES:
            size = f"the model's input takes {self.buffer_bytes} bytes"
            raise ValueError(f"{size} and the protocol carries {MOST_BYTES}")

    def input(self, buffer: bytes) -> bytes:
        """The model's input tensor. Raises ValueError for NaN and infinity."""
        if self._kind == INT8:
            return bytes(buffer)
        if self._kind == UINT8:
            return bytes(byte ^ 0x80 for byte in buffer)  # 0..255 becomes -128..127
        try:
            return bytes(self._input.byte(number) for number in self._floats(buffer))
        except (ValueError, OverflowError):
            raise ValueError("Input with a number that is not finite") from None

    def results(self, buffer: bytes, output: bytes) -> "list[float]":
        """The numbers that `results` prints: one a class, or ad01's mean squared error."""
        numbers = [self._output.number(byte) for byte in output]
        if self.profile != "ad01":
            return numbers
        total = 0.0
        count = min(len(buffer) // 4, len(numbers))
        for place, number in enumerate(self._floats(buffer)):
            if place < count:
                total += (number - numbers[place]) * (number - numbers[place])
        return [total / count]

    def _floats(self, buffer: bytes) -> "Iterator[float]":
        for place in range(0, len(buffer), 4):
            yield struct.unpack_from("<f", buffer, place)[0]
