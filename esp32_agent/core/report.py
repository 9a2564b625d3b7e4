"""A run and the bytes of its report, which stay the same until the service has stored them."""

from esp32_agent.core.encode import Writer
from esp32_agent.core.window import Measurement
from esp32_agent.port.base import Port

_LONGEST_ERROR = 200


class Run:
    """One run of this boot. `run_id` is None where the service did not see it start."""

    def __init__(self, boot_id: str, sequence: int, run_id: str | None, started_us: int) -> None:
        self.boot_id = boot_id
        self.sequence = sequence
        self.run_id = run_id
        self.started_us = started_us  # time of day; 0 while the clock is not set
        self.ticks_us = 0  # from the service's answer to the end
        self.measurement: Measurement | None = None
        self.golden: tuple[int, str] | None = None
        self.error: str | None = None


def build(port: Port, run: Run) -> bytes:
    """The report as JSON."""
    runner, board = port.runner, port.board
    measurement = run.measurement or Measurement(0)
    writer = Writer(1024 + 80 * len(measurement.windows))
    writer.begin("{")
    writer.field("schema", 1)
    writer.field("boot_id", run.boot_id)
    writer.field("sequence", run.sequence)
    writer.field("run_id", run.run_id)
    writer.field("model_sha256", runner.model_sha256)
    writer.field("input_bytes", runner.input_bytes)
    writer.field("input_source", port.camera.name)
    writer.key("runner")
    writer.begin("{")
    writer.field("name", runner.name)
    writer.field("version", runner.version)
    writer.end("}")
    writer.field("board", board.name)
    writer.field("clock_hz", board.clock_hz)
    writer.field("firmware_sha256", board.firmware_sha256)
    _measured(writer, measurement, port.power.source)
    _golden(writer, run.golden)
    writer.field("arena_bytes", runner.arena_bytes)
    writer.field("heap_free", board.heap_free())
    writer.field("started_us", run.started_us)
    writer.field("ticks_us", run.ticks_us)
    writer.field("error", run.error if run.error is None else run.error[:_LONGEST_ERROR])
    writer.end("}")
    return writer.done()


def _measured(writer: Writer, measurement: Measurement, power_source: str) -> None:
    writer.field("warmup", measurement.warmup)
    writer.key("windows")
    writer.begin("[")
    for window in measurement.windows:
        writer.begin("{")
        writer.field("count", window.count)
        writer.field("total_us", window.total_us)
        writer.field("energy_uj", window.energy_uj)
        writer.end("}")
    writer.end("]")
    summary = measurement.latency.summary()
    writer.key("latency_us")
    writer.begin("{")
    for name in ("count", "min", "p50", "p90", "p99"):
        writer.field(name, summary[name])
    writer.end("}")
    writer.key("power")
    writer.begin("{")
    writer.field("source", power_source)
    writer.field("idle_uw", measurement.idle_uw)
    writer.end("}")


def _golden(writer: Writer, golden: tuple[int, str] | None) -> None:
    writer.key("golden")
    if golden is None:
        writer.value(None)
        return
    writer.begin("{")
    writer.field("count", golden[0])
    writer.field("digest", golden[1])
    writer.end("}")
