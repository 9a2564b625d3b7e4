"""What the configuration says to the core."""

_RANGES = (
    ("period_s", 0, 31536000),
    ("windows", 1, 64),
    ("window_s", 0, 3600),
    ("warmup", 0, 10000),
    ("heartbeat_s", 1, 86400),
    ("timeout_s", 1, 300),
    ("queue_bytes", 4096, 1 << 30),
    ("batch_reports", 1, 32),
    ("batch_bytes", 1024, 49152),
    ("start_attempts", 1, 100),
    ("retry_first_ms", 1, 3600000),
    ("retry_most_ms", 1, 3600000),
)


class Settings:
    """Numbers are whole; `fault` says what is wrong with them."""

    def __init__(
        self,
        invite: str = "",
        name: str | None = None,
        golden: str = "golden.bin",
        period_s: int = 3600,
        windows: int = 5,
        window_s: int = 10,
        warmup: int = 5,
        heartbeat_s: int = 300,
        timeout_s: int = 30,
        queue_bytes: int = 65536,
        batch_reports: int = 8,
        batch_bytes: int = 4096,
        start_attempts: int = 3,
        retry_first_ms: int = 1000,
        retry_most_ms: int = 300000,
    ) -> None:
        self.invite = invite
        self.name = name
        self.golden = golden  # the file of golden inputs, as the storage names it
        self.period_s = period_s  # from the start of a run to the start of the next
        self.windows = windows
        self.window_s = window_s
        self.warmup = warmup
        self.heartbeat_s = heartbeat_s
        self.timeout_s = timeout_s  # of each step of a request
        self.queue_bytes = queue_bytes
        self.batch_reports = batch_reports  # in a message; the service takes 32
        self.batch_bytes = batch_bytes  # of the reports of a message, which lies in memory as a whole
        self.start_attempts = start_attempts  # to be given a run, before one is measured without a witness
        self.retry_first_ms = retry_first_ms
        self.retry_most_ms = retry_most_ms

    def fault(self) -> str | None:
        """A sentence about the first setting that is out of range; None where all are in range."""
        for name, least, most in _RANGES:
            value: object = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                return f"{name} must be a whole number from {least} to {most}."
        return None
