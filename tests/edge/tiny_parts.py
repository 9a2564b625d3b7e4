"""A port for the device of MLPerf Tiny, in both Pythons: a clock that a test knows, and a model of its input."""

BYTES = 12


class Clock:
    """Ticks of 1,000 us that wrap around as a board's do, at 2**30."""

    now = 2**30 - 1500

    def ticks_us(self):
        self.now += 1000
        return self.now % 2**30

    def ticks_diff(self, later, earlier):
        return (later - earlier + 2**29) % 2**30 - 2**29


class Board:
    def collect(self):
        """Has no garbage."""


class Runner:
    input_bytes, output_bytes = BYTES, 3
    error: "Exception | None" = None
    data = b""

    def set_input(self, data):
        self.data = data

    def invoke(self):
        if self.error:
            raise self.error

    def output(self):
        return self.data[:3]


class Port:
    def __init__(self):
        self.clock, self.board, self.runner = Clock(), Board(), Runner()
