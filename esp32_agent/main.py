"""Wires the agent: the configuration, the port of this machine, and the core.

Modules are imported when they are needed, so that a small heap never holds the reader of the configuration and the
agent at once.
"""

import gc
import sys

from esp32_agent.port.base import Port, PortError
from esp32_agent.section import ConfigError, Section

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from esp32_agent.core.agent import Agent

USAGE = "usage: python -m esp32_agent --config config.json [--runs N]"
OK, FAILED, REFUSED = 0, 1, 2
RESTART_MS = 10_000
LOADING_BYTES = 4096
BATCH_BYTES = 4096
BUILDERS = (
    "esp32_agent.port.micropython.build",
    "esp32_agent.port.parts",
    "esp32_agent.port.files",
)


def main(arguments: "Sequence[str]" = ()) -> int:
    """Runs for ever, or until `--runs` reports are sent.

    Returns 2 for a wrong argument or configuration and 1 for a machine that does not fit it, after a sentence.
    """
    try:
        path, runs = read_arguments(list(arguments))
        collect_every(LOADING_BYTES)
        config = read_config(path)
        forget("esp32_agent.config")
        agent = make_agent(config)
        forget(*BUILDERS)
        collect_every(-1)
    except ConfigError as error:
        print(error)
        return REFUSED
    except PortError as error:
        print(error)
        return FAILED
    run(agent, runs)
    return OK


def collect_every(count: int) -> None:
    """Collect garbage after so many allocated bytes, and not only when the heap is full; -1 for that again.

    It keeps modules together while they are loaded. While a model is timed, core alone says when garbage is collected.
    """
    if sys.implementation.name == "micropython":
        gc.threshold(count)
        gc.collect()


def read_arguments(arguments: list[str]) -> tuple[str, int]:
    """The configuration's path, and how many runs are wanted (0: without end). Raises ConfigError."""
    path, runs = "config.json", 0
    while arguments:
        name = arguments.pop(0)
        if name not in ("--config", "--runs") or not arguments:
            raise ConfigError(USAGE)
        value = arguments.pop(0)
        if name == "--config":
            path = value
        elif value.isdigit():
            runs = int(value)
        else:
            raise ConfigError(USAGE)
    return path, runs


def read_config(path: str) -> Section:
    """The configuration. Raises ConfigError."""
    import esp32_agent.config

    return esp32_agent.config.read(path)


def forget(*names: str) -> None:
    """Give back the memory of modules that are needed once, under MicroPython; nothing else may refer to them."""
    if sys.implementation.name == "micropython":
        for name in names:
            if sys.modules.pop(name, None) is not None:
                parent, _, child = name.rpartition(".")
                delattr(sys.modules[parent], child)
        gc.collect()


def make_agent(config: Section) -> "Agent":
    """The core on the port of this machine. Raises ConfigError and PortError."""
    from esp32_agent.core.agent import Agent, Settings

    port = build_port(config)
    heap_free = port.board.heap_free()
    settings = Settings(
        invite=config.invite or "",
        name=config.name,
        golden=config.golden or "golden.bin",
        period_s=config.period_s,
        windows=config.windows,
        window_s=config.window_s,
        warmup=config.warmup,
        heartbeat_s=config.heartbeat_s,
        timeout_s=config.timeout_s,
        queue_bytes=config.queue_bytes,
        batch_bytes=BATCH_BYTES if heap_free == 0 else max(1024, min(BATCH_BYTES, heap_free // 16)),
        retry_first_ms=config.retry_first_ms,
        retry_most_ms=config.retry_most_ms,
    )
    return Agent(port, settings)


def build_port(config: Section) -> Port:
    """The port of this machine. Raises ConfigError and PortError."""
    if sys.implementation.name != "micropython":
        from esp32_agent.port.host.build import build
    elif sys.platform == "esp32":
        from esp32_agent.port.micropython.build import build
    else:
        from esp32_agent.port.unix import build
    return build(config)


def run(agent: "Agent", runs: int) -> None:
    """Steps without end, or until `runs` runs have ended and all reports are sent."""
    from esp32_agent.core.agent import REPORT

    ended = 0
    while not runs or ended < runs or agent.queue.depth:
        state = agent.state
        agent.step()
        if state == REPORT:
            ended += 1


def on_board() -> None:
    """The board's main program: an error that nobody foresaw is printed, and the board begins anew."""
    import time

    import machine

    try:
        main()
    except Exception as error:
        sys.print_exception(error)
        time.sleep_ms(RESTART_MS)
        machine.reset()
