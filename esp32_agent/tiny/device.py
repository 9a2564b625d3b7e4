"""The device's side of MLPerf Tiny's protocol over a serial line, as its reference firmware speaks it.

The runner sends commands that `%` ends; each answer is lines that CR LF ends, the last of them `m-ready`. What cannot
be done is answered with a line `e-[...]`, and the device goes on. Runs on MicroPython and on CPython.
"""

from esp32_agent.port.base import Clock, Port
from esp32_agent.tiny.codec import MOST_BYTES, Codec
from esp32_agent.tiny.commands import Commands, digits, whole

TYPE_CHECKING = False  # MicroPython has no typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FIRMWARE = "ULPMark for tinyML Firmware V0.0.1"
WARMUP = 10
MOST_INFERENCES = 1000000
LOOKS = 16
"""After so many inferences the clock is read: its ticks wrap around, and none of them takes half a minute."""
A_LINE = 8
HELP = (
    "help         : Print this information",
    "name         : Print the name of the device",
    "timestamp    : Print or signal the time",
    "db load N    : Expect N bytes of input",
    "db HH[HH]*   : Take bytes of input as hex",
    "db print     : Print the input as hex",
    "infer N [W]  : Execute N inferences after W warmups (10)",
    "results      : Print the result of the last inference",
    "profile      : Print the profile and the model",
)


class Stream:
    """A serial line, as `machine.UART` is one."""

    def read(self, count: int) -> "bytes | None":
        """At most `count` bytes; None where none came, b"" at the end."""
        raise NotImplementedError

    def write(self, data: bytes) -> "int | None":
        """How many bytes were taken; None for none."""
        raise NotImplementedError


class TinyDevice:
    """One device. With a `pulse` it is in energy mode: a timestamp calls it, for a power monitor, and prints nothing.

    `port` is a port of the agent, of which it uses clock, runner and board.
    """

    def __init__(
        self,
        port: Port,
        stream: Stream,
        codec: Codec,
        vendor: str = "optigpu",
        pulse: "Callable[[], None] | None" = None,
    ) -> None:
        self._port, self._stream, self._codec = port, stream, codec
        self._vendor, self._pulse = _plain(vendor), pulse
        self._commands = Commands()
        self._laps = _Laps(port.clock)
        self._buffer = bytearray()
        self._expected = 0
        self._output: bytes | None = None
        self._table: dict[str, Callable[[Sequence[str]], None]] = {
            "help": self._help,
            "name": self._name,
            "timestamp": self._timestamp,
            "profile": self._profile,
            "db": self._db,
            "infer": self._infer,
            "results": self._results,
        }

    def serve(self) -> None:
        """Answers until the stream ends."""
        self.boot()
        while True:
            data = self._stream.read(LOOKS)
            if data is None:
                continue
            if not data:
                return
            for text, wrong in self._commands.take(data):
                self.command(text, wrong)

    def boot(self) -> None:
        """What a device says after a reset."""
        self._say("m-timestamp-mode-energy" if self._pulse else "m-timestamp-mode-performance")
        self._timestamp(())
        self._say("m-init-done")
        self._say("m-ready")

    def command(self, text: "str | None", wrong: "str | None" = None) -> None:
        """Answers one command. Nothing that a runner can send ends the device."""
        self._laps.look()
        try:
            if wrong:
                raise ValueError(wrong)
            words = text.split() if text else []
            handler = self._table.get(words[0]) if words else None
            if handler is None:
                raise ValueError(f"Unknown command: {words[0] if words else ''}")
            handler(words[1:])
        except MemoryError:
            self._say("e-[Out of memory]")
        except Exception as error:
            self._say(f"e-[{_plain(str(error) or type(error).__name__)}]")
        self._say("m-ready")

    def _help(self, words: "Sequence[str]") -> None:
        self._say(FIRMWARE)
        for line in HELP:
            self._say(line)

    def _name(self, words: "Sequence[str]") -> None:
        self._say(f"m-name-dut-[{self._vendor}]")

    def _profile(self, words: "Sequence[str]") -> None:
        self._say(f"m-profile-[{FIRMWARE}]")
        self._say(f"m-model-[{self._codec.profile}]")

    def _timestamp(self, words: "Sequence[str]") -> None:
        if self._pulse:
            self._pulse()
        else:
            self._say(f"m-lap-us-{self._laps.look()}")

    def _db(self, words: "Sequence[str]") -> None:
        if not words:
            raise ValueError("Command 'db' requires a subcommand")
        if words[0] == "load":
            self._load(words[1:])
        elif words[0] == "print":
            self._print()
        else:
            self._take(words[0])

    def _load(self, words: "Sequence[str]") -> None:
        if not words:
            raise ValueError("Command 'db load' requires the # of bytes")
        count = whole(words[0])
        if not count:
            raise ValueError("Command 'db load' must be >0 bytes")
        if count > MOST_BYTES:
            raise ValueError(f"Supplied buffer size {count} exceeds maximum of {MOST_BYTES}")
        self._expected = count
        self._buffer = bytearray()
        self._say(f"m-[Expecting {count} bytes]")

    def _take(self, text: str) -> None:
        if not self._expected:
            raise ValueError("Command 'db load' must come first")
        if len(self._buffer) == self._expected:
            raise ValueError(f"All {self._expected} bytes are loaded")
        self._buffer.extend(digits(text)[: self._expected - len(self._buffer)])
        if len(self._buffer) == self._expected:
            self._say("m-load-done")

    def _print(self) -> None:
        for place in range(0, len(self._buffer), A_LINE):
            row = self._buffer[place : place + A_LINE]
            self._say("m-buffer-" + "-".join([f"{byte:02x}" for byte in row]))

    def _infer(self, words: "Sequence[str]") -> None:
        count = whole(words[0]) if words else 1
        warmup = whole(words[1]) if len(words) > 1 else WARMUP
        if not count:
            raise ValueError("Inference iterations must be >0")
        if warmup is None:
            raise ValueError("Inference warmup must be >=0")
        if max(count, warmup) > MOST_INFERENCES:
            raise ValueError(f"Inference iterations and warmup must be at most {MOST_INFERENCES}")
        if len(self._buffer) != self._codec.buffer_bytes:
            raise ValueError(f"Input has {len(self._buffer)} of {self._codec.buffer_bytes} bytes")
        self._output = None
        data = self._codec.input(bytes(self._buffer))
        self._port.runner.set_input(data)
        self._say(f"m-warmup-start-{warmup}")
        self._invoke(warmup)
        self._say("m-warmup-done")
        self._port.board.collect()  # a collection of garbage takes milliseconds: outside of the timing
        self._say(f"m-infer-start-{count}")
        self._timestamp(())
        self._invoke(count)
        self._timestamp(())
        self._say("m-infer-done")
        if count + warmup > 1:
            # A model may use its input's memory for something else, so that later inferences saw another input.
            self._port.runner.set_input(data)
            self._port.runner.invoke()
        self._output = bytes(self._port.runner.output())
        self._results(())

    def _invoke(self, count: int) -> None:
        invoke = self._port.runner.invoke
        for number in range(1, count + 1):
            invoke()
            if number % LOOKS == 0:
                self._laps.look()

    def _results(self, words: "Sequence[str]") -> None:
        if self._output is None:
            raise ValueError("No inference yet")
        numbers = self._codec.results(bytes(self._buffer), self._output)
        shown = ",".join([f"{number:.3f}" for number in numbers])
        self._say(f"m-results-[{shown}]")

    def _say(self, line: str) -> None:
        data = (line + "\r\n").encode()
        while data:
            taken = self._stream.write(data)
            data = data[taken or 0 :]


class _Laps:
    """Microseconds since the start on a counter that does not wrap around, made of one that does."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.ticks_us()
        self._total = 0

    def look(self) -> int:
        """The time now. To be called more often than the clock's ticks wrap around."""
        now = self._clock.ticks_us()
        self._total += self._clock.ticks_diff(now, self._last)
        self._last = now
        return self._total


def _plain(text: str) -> str:
    """Text for between brackets: one short line without brackets, of ASCII."""
    kept = [letter if " " <= letter <= "~" and letter not in "[]" else " " for letter in text]
    return "".join(kept)[:72]
