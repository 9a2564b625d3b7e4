"""What the agent's core asks of the machine under it, and the errors by which the machine says no.

A port subclasses these (or has the same methods). Times are integer microseconds, energies integer microjoules, powers
integer microwatts: a board's floats have 24 bits. This file runs on MicroPython and imports nothing.
"""


class PortError(Exception):
    """The machine cannot do what was asked; the message says why, for the report's field `error`."""


class HttpError(PortError):
    """No complete answer came: no route, TLS refused, timeout, connection reset, an answer that is too large.

    Whether the server saw the request is not known, so the caller sends the same again.
    """


class StorageFullError(PortError):
    """The medium has no room. A part of an `append` may have been written; a `replace` left the old content."""


class RunnerError(PortError):
    """The model cannot be loaded or run: a truncated file, too small an arena, an input of the wrong size."""


class CameraError(PortError):
    """No frame could be had."""


class Clock:
    """Ticks that wrap around, and the time of day."""

    def ticks_us(self) -> int:
        """A counter of microseconds that may wrap around (at 2**30 on the board)."""
        raise NotImplementedError

    def ticks_diff(self, later: int, earlier: int) -> int:
        """`later - earlier` in microseconds, right across one wrap: for spans below half the period (536 s)."""
        raise NotImplementedError

    def sleep_ms(self, ms: int) -> None:
        raise NotImplementedError

    def unix_us(self) -> int:
        """Microseconds since 1970, or 0 while the time is not known."""
        raise NotImplementedError

    def synchronise(self) -> bool:
        """Ask a time server (NTP) once; whether the time is known now. Raises nothing."""
        raise NotImplementedError


class Network:
    """The link, Wi-Fi on the board."""

    def connect(self) -> bool:
        """Join the network, or see that it is joined; False where that fails. Raises nothing."""
        raise NotImplementedError

    def rssi(self) -> int | None:
        """Signal strength in dBm; None where there is no radio."""
        raise NotImplementedError


class Http:
    """Requests to the one server of the configuration."""

    def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, timeout_s: int
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers with lower-case names, and body of the answer.

        It verifies the certificate of an https server, never follows a redirect (3xx comes back as it is), sends `body`
        unchanged with its Content-Length, and takes at most `timeout_s` for each step. Raises HttpError for all that
        goes wrong, an answer above 16 KiB and one that is not HTTP among it.
        """
        raise NotImplementedError


class Storage:
    """Named files in one folder that outlive a reboot; names are plain (`queue.log`).

    A name that begins with "/" is a path of its own and is only read: the golden inputs may lie elsewhere.
    """

    def read(self, name: str, offset: int = 0, size: int = -1) -> bytes | None:
        """`size` bytes from `offset` (all of them with -1; fewer where the file ends); None where no such file is."""
        raise NotImplementedError

    def append(self, name: str, data: bytes) -> None:
        """Add to the end (a new file where there is none), and flush to the medium.

        After a power cut any prefix of `data` may be there. Raises StorageFullError.
        """
        raise NotImplementedError

    def replace(self, name: str, data: bytes) -> None:
        """Make `data` the content: after a power cut the old or the new content is there, never a mixture.

        Write to another name, flush, rename. Raises StorageFullError, with the old content left.
        """
        raise NotImplementedError

    def truncate(self, name: str, size: int) -> None:
        """Keep the first `size` bytes of a file that is there and is at least as long."""
        raise NotImplementedError

    def size(self, name: str) -> int:
        """The length in bytes; 0 where no such file is."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        """Remove the file; nothing happens where no such file is."""
        raise NotImplementedError


class Power:
    """The sensor of the supply's power: `source` is ina219, ina226, simulated, or none."""

    source: str = "none"

    def read_uw(self) -> int | None:
        """The power now in microwatts (a sensor that averages gives its last average); None without a sensor."""
        return None

    def start(self) -> None:
        """Begin to sum energy."""

    def poll(self) -> None:
        """Take a sample: called after each inference, outside of its timing. Sampling by a timer needs none."""

    def stop(self) -> tuple[int | None, int]:
        """Energy since `start` in microjoules, None where it is not known, and how many samples it rests on."""
        return None, 0


class Runner:
    """A loaded model. The names are tflm-native, tflm-serial, tflm-host, litert-host and simulator."""

    name: str
    version: str
    model_sha256: str  # of the .tflite file's bytes, 64 hex digits
    arena_bytes: int
    input_bytes: int
    output_bytes: int

    def set_input(self, data: bytes) -> None:
        """Fill the input tensor with `input_bytes` bytes. Raises RunnerError for another number."""
        raise NotImplementedError

    def invoke(self) -> int | None:
        """One inference; this alone is timed. Raises RunnerError.

        It returns the microseconds if the runner has a clock nearer to the model than core's, else None.
        """
        raise NotImplementedError

    def output(self) -> bytes:
        """The output tensor's `output_bytes` bytes."""
        raise NotImplementedError


class Camera:
    """Where inputs come from: fixed (one and the same), camera, folder or v4l2."""

    name: str = "fixed"

    def frame(self) -> bytes:
        """An input for the runner, `input_bytes` bytes. Raises CameraError."""
        raise NotImplementedError


class Board:
    """The board itself."""

    name: str  # the catalog's id, such as esp32s3-n16r8
    clock_hz: int
    firmware_sha256: str  # 64 hex digits; of the agent's own files where the firmware cannot be read

    def reset_reason(self) -> str:
        """Why it booted: power_on, reset, watchdog, brownout, deep_sleep, or unknown."""
        raise NotImplementedError

    def heap_free(self) -> int:
        """Free bytes of the interpreter's heap; 0 where it has no limit."""
        raise NotImplementedError

    def unique_id(self) -> str:
        """The chip's own id in hex."""
        raise NotImplementedError

    def random_bytes(self, count: int) -> bytes:
        """Random bytes that are fit for keys."""
        raise NotImplementedError

    def collect(self) -> None:
        """Collect garbage now, so that it is not collected inside a timing."""
        raise NotImplementedError


class Port:
    """All of it together, as core takes it."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        http: Http,
        storage: Storage,
        power: Power,
        runner: Runner,
        camera: Camera,
        board: Board,
    ) -> None:
        self.clock = clock
        self.network = network
        self.http = http
        self.storage = storage
        self.power = power
        self.runner = runner
        self.camera = camera
        self.board = board
