"""A runner without a model, for machines that have no TFLite: its reports say `simulator` and rank nowhere."""

import hashlib

from esp32_agent.port.base import Clock, Runner, RunnerError


class SimulatedRunner(Runner):
    """Each inference takes `latency_ms` of sleep; the output is a digest of the model's hash and the input."""

    name = "simulator"
    version = "1"
    arena_bytes = 0

    def __init__(
        self, clock: Clock, model_sha256: str, input_bytes: int, output_bytes: int, latency_ms: int
    ) -> None:
        self.model_sha256 = model_sha256
        self.input_bytes = input_bytes
        self.output_bytes = output_bytes
        self._clock = clock
        self._latency_ms = latency_ms
        self._input = bytes(input_bytes)

    def set_input(self, data: bytes) -> None:
        if len(data) != self.input_bytes:
            raise RunnerError(f"The input has {len(data)} bytes and not {self.input_bytes}.")
        self._input = data

    def invoke(self) -> None:
        self._clock.sleep_ms(self._latency_ms)

    def output(self) -> bytes:
        return simulated_output(self.model_sha256, self._input, self.output_bytes)


def simulated_output(model_sha256: str, data: bytes, count: int) -> bytes:
    """What a simulated model of that hash answers, so that golden outputs can be made without a device."""
    output = b""
    while len(output) < count:
        digest = hashlib.sha256(model_sha256.encode() + len(output).to_bytes(4, "big"))
        digest.update(data)
        output += digest.digest()
    return output[:count]
