"""Wires the agent: the configuration, the port of this machine, and the core."""

import sys

from esp32_agent import config as configuration
from esp32_agent.config import ConfigError
from esp32_agent.core import agent as states
from esp32_agent.core.agent import Agent
from esp32_agent.core.settings import Settings
from esp32_agent.port.base import Port, PortError

USAGE = "usage: python -m esp32_agent --config config.json [--runs N]"
OK, FAILED, REFUSED = 0, 1, 2
RESTART_MS = 10_000


def main(arguments=("--config", "config.json")) -> int:
    """Runs for ever, or until `--runs` reports are sent.

    Returns 2 for a wrong argument or configuration and 1 for a machine that does not fit it, after a sentence.
    """
    try:
        path, runs = read_arguments(list(arguments))
        config = configuration.read(path)
        agent = Agent(build_port(config), make_settings(config))
    except ConfigError as error:
        print(error)
        return REFUSED
    except PortError as error:
        print(error)
        return FAILED
    run(agent, runs)
    return OK


def read_arguments(arguments):
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


def build_port(config) -> Port:
    """The port of this machine. Raises ConfigError and PortError."""
    if sys.implementation.name != "micropython":
        from esp32_agent.port.host.build import build
    elif sys.platform == "esp32":
        from esp32_agent.port.micropython.build import build
    else:
        from esp32_agent.port.unix.build import build
    return build(config)


def make_settings(config) -> Settings:
    return Settings(
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
        retry_first_ms=config.retry_first_ms,
        retry_most_ms=config.retry_most_ms,
    )


def run(agent: Agent, runs: int) -> None:
    """Steps without end, or until `runs` runs have ended and all reports are sent."""
    ended = 0
    while not runs or ended < runs or agent.queue.depth:
        state = agent.state
        agent.step()
        if state == states.REPORT:
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
