"""TFLite Micro inside of MicroPython: the C module of firmware/tflm_module."""

from esp32_agent.port import files
from esp32_agent.port.base import Runner, RunnerError


class NativeRunner(Runner):
    """Runs a .tflite file. The arena lies in PSRAM, or in the faster internal SRAM where it fits."""

    name = "tflm-native"

    def __init__(self, path: str, arena_bytes: int, psram: bool) -> None:
        try:
            import tflm
        except ImportError:
            raise RunnerError(
                "This firmware has no TFLite Micro: flash the one of firmware/tflm_module."
            ) from None
        self.version = tflm.VERSION
        self.model_sha256 = files.model_sha256(path)
        self.arena_bytes = arena_bytes
        try:
            with open(path, "rb") as file:
                self._model = tflm.Model(file.read(), arena_bytes, psram)
        except (OSError, ValueError) as error:
            raise RunnerError(f"The model {path} cannot be loaded: {error}") from None
        except MemoryError:
            raise RunnerError(f"The heap has no room for the model {path}.") from None
        self.input_bytes = self._model.input_bytes
        self.output_bytes = self._model.output_bytes

    def set_input(self, data: bytes) -> None:
        try:
            self._model.set_input(data)
        except ValueError as error:
            raise RunnerError(str(error)) from None

    def invoke(self) -> None:
        try:
            self._model.invoke()
        except RuntimeError as error:
            raise RunnerError(str(error)) from None

    def output(self) -> bytes:
        return self._model.output()
